"""kill -9 in the middle of an answer of the demo model: during reasoning, a tool call, its arguments, the tool, or the
text. The final text equals that of an undisturbed server, and readers of the stream miss nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path

import httpx
import pytest
from chaos.killed_server import CONTEXT, serve_until
from chaos.ledger import LONG, Ledger
from valkey_server import MISSING, PROGRAM, ValkeyServer
from web.conftest import EventReader, Screen
from web.store.postgres_server import PostgresServer, postgres_server

from notso.web.values.ids import new_id

ANSWERS, KILLS = (100, 7) if LONG else (1, 2)
ANSWERS, KILLS = (
    int(os.environ.get(f"KILLED_{name}", usual)) for name, usual in (("ANSWERS", ANSWERS), ("KILLS", KILLS))
)
# number of the first answer; it determines the question and where to kill
FIRST = int(os.environ.get("KILLED_FIRST", 0))
AT_ONCE = int(os.environ.get("KILLED_AT_ONCE", 8 if LONG else 1))  # number of servers killed at the same time
PACE_S = float(os.environ.get("KILLED_PACE_S", 0.05 if LONG else 0.01))  # seconds between two engine steps
QUESTIONS = ("What is {0} * {1}?", "Calculate {0}+{1}", "Hello, I am number {0}", "Who wrote number {0}?")


class Server:
    """A server with the demo model that kills itself at `place`: a number of tokens, "tool", or "" for never."""

    def __init__(self, folder: Path, place: str = "", database: str | None = None, valkey: str | None = None) -> None:
        began = time.monotonic()
        ready, told = CONTEXT.Pipe(duplex=False)
        given = (place, told, folder, PACE_S, database, valkey)
        self.process = CONTEXT.Process(target=serve_until, args=given, daemon=True)
        self.process.start()
        told.close()
        try:
            url = ready.recv()
        except EOFError:  # the server died while it resumed the answer
            url = "http://127.0.0.1:1"
        self.client = httpx.Client(base_url=url, timeout=60)
        self.start_s = time.monotonic() - began

    def ask(self, question: str, seed: int) -> str:
        fields = {"seed": str(seed), "tools": "calculator", "temperature": "1.5", "max_tokens": "120"}
        assert self.client.post("/settings", data=fields).status_code in (200, 303)
        answer = self.client.post("/chats", data={"text": question, "key": new_id(), "thinking": "on"})
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    def generation(self, chat: str) -> str:
        """Return the generation id of a chat's unfinished answer, or "" if it has ended."""
        return (re.findall(r"/generations/([\w-]+)/events", self.client.get(chat).text) or [""])[0]

    def follow(self, generation: str) -> str | None:
        """Read the stream to its end; return the last state, or None if the server died."""
        state = None
        try:
            with self.client.stream("GET", f"/generations/{generation}/events") as response:
                for line in response.iter_lines():
                    if line.startswith("data:") and '"state"' in line:
                        state = json.loads(line.removeprefix("data:"))["state"]
        except httpx.HTTPError:
            return None
        return state

    def read(self, generation: str) -> tuple[str | None, str]:
        """Read the stream as a page does; return the last state and the HTML of the answer."""
        screen, reader, state = Screen(), EventReader(), None
        with self.client.stream("GET", f"/generations/{generation}/events") as response:
            for chunk in response.iter_raw():
                reader.feed(chunk)
        shown = -1
        for event in reader.events:
            if event.event == "message" and (event.data.startswith("<!--snapshot-->") or int(event.id) > shown):
                shown = int(event.id)
                screen.apply(event)
            elif '"state"' in event.data:
                state = json.loads(event.data)["state"]
        parts = [html for target, html in screen.parts.items() if "-answer-" in target]
        return state, "".join(parts)

    def text(self, chat: str) -> str:
        """Return the source of a chat's only answer."""
        here = re.findall(rf'href="({chat}/messages/[^/"]*)/text', self.client.get(chat).text)[0]
        return self.client.get(f"{here}/text?part=all").text

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.client.close()


def answer(folder: Path, chat: str) -> tuple[str, ...]:
    """Return the stored fields of a chat's only answer, without the random ids of its calls."""
    sql = "SELECT content, reasoning, state, tool_uses FROM messages WHERE chat_id = ? AND role = 'assistant'"
    with closing(sqlite3.connect(f"{(folder / 'notso.db').as_uri()}?mode=ro", uri=True)) as database:
        *texts, uses = database.execute(sql, (chat.rpartition("/")[2],)).fetchone()
    told = [[use[name] for name in ("name", "arguments", "state", "result", "content_at")] for use in json.loads(uses)]
    return (*texts, json.dumps(told))


def stored_tokens(folder: Path) -> int:
    """Return how many tokens of a chat's only answer are stored."""
    with closing(sqlite3.connect(f"{(folder / 'notso.db').as_uri()}?mode=ro", uri=True)) as database:
        traces = database.execute("SELECT trace FROM answer_traces").fetchall()
    return sum(len(run["ids"]) for (trace,) in traces for run in json.loads(trace)["runs"])


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    server = ValkeyServer(tmp_path)
    yield server
    server.stop()


def places(rng: random.Random, has_call: bool) -> list[str]:
    drawn = [str(place) for place in sorted(rng.sample(range(1, 60 if has_call else 30), KILLS))]
    if has_call:
        drawn.insert(rng.randrange(len(drawn)), "tool")
    return drawn[:KILLS]


@dataclass
class Killed:
    """The result for one answer: the number of kills, and the seconds that each of them cost."""

    kills: int = 0
    extra_s: float = 0.0
    differs: str = ""
    parts: list[tuple[float, ...]] = field(default_factory=list)

    def watch(self, server: Server, folder: Path, before: int) -> None:
        """Measure a restart: the time for the process, for the model, and for the replay with one further token."""
        began, loaded = time.monotonic(), 0.0
        while server.process.is_alive():
            try:
                if not loaded and server.client.get("/health").status_code == 200:
                    loaded = time.monotonic()
            except httpx.HTTPError:
                return  # the server was killed again
            if loaded and stored_tokens(folder) > before:
                self.parts.append((server.start_s, loaded - began, time.monotonic() - loaded))
                return
            time.sleep(0.01)

    @property
    def told_parts(self) -> dict[str, float]:
        names = ("process s", "model s", "replay and token s")
        return {name: statistics.median(each) for name, each in zip(names, zip(*self.parts, strict=True), strict=False)}


def kill_repeatedly(folder: Path, number: int) -> Killed:
    rng, told = random.Random(number), Killed()
    question = QUESTIONS[number % len(QUESTIONS)].format(rng.randint(2, 99), rng.randint(2, 99))
    chat = generation = ""
    began = time.monotonic()
    for place in places(rng, has_call=number % len(QUESTIONS) < 2):
        before = stored_tokens(folder) if chat else 0
        server = Server(folder, place)
        if chat:
            threading.Thread(target=told.watch, args=(server, folder, before), daemon=True).start()
        try:
            chat = chat or server.ask(question, seed=number)
            generation = generation or server.generation(chat)
            ended = server.follow(generation) if generation else "done"
        except httpx.HTTPError:
            assert chat, "the server died before it stored the question"
            ended = None
        server.process.join(60 if ended is None else 0)
        told.kills += server.process.exitcode == -signal.SIGKILL
        server.end()
        if ended is not None:
            break  # the answer ended before this place
    server = Server(folder)
    try:
        generation = generation or server.generation(chat)
        assert not generation or server.follow(generation) == "done", question
        killed_s, killed = time.monotonic() - began, answer(folder, chat)
        began = time.monotonic()
        undisturbed = server.ask(question, seed=number)
        generation = server.generation(undisturbed)
        assert not generation or server.follow(generation) == "done", question
        told.extra_s = (killed_s - (time.monotonic() - began)) / max(told.kills, 1)
        if killed != (expected := answer(folder, undisturbed)):
            told.differs = f"{number}: {killed} for {expected}"
    finally:
        server.end()
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in told.told_parts.items())
    print(
        f"answer {number}: {told.kills} kills, {told.extra_s:.1f} s each ({parts}), {told.differs or 'equal'}",
        flush=True,
    )
    return told


@pytest.mark.timeout(0 if ANSWERS > 1 else 300)
def test_killed_answer_resumes_byte_for_byte(tmp_path: Path, ledger: Ledger) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        numbers = range(FIRST, FIRST + ANSWERS)
        told = list(pool.map(lambda number: kill_repeatedly(tmp_path / f"{number}", number), numbers))
    kills, differing = sum(each.kills for each in told), [each.differs for each in told if each.differs]
    assert not differing, differing
    assert kills >= ANSWERS * min(KILLS, 3) / 2
    ledger.note(
        "store",
        "server killed while it generates an answer",
        f"kill -9 at {kills} places in {ANSWERS} answers (reasoning, tool calls, arguments, tools, text): in the end,"
        " each answer equals that of an undisturbed server",
        len(differing),
        {"extra s per kill": statistics.median(each.extra_s for each in told)},
    )


@pytest.mark.long("chaos")
@pytest.mark.timeout(0 if LONG else 600)
def test_another_replica_resumes_answer_without_interrupting_readers(
    tmp_path: Path, postgres: PostgresServer, valkey: ValkeyServer, ledger: Ledger
) -> None:
    """Three replicas on PostgreSQL and Valkey: the writing one is killed, and readers at another see one unbroken
    stream."""
    answers = int(os.environ.get("KILLED_ANSWERS", 20 if LONG else 3))
    shared = (postgres.new_database(), valkey.url)
    differing = list[str]()
    others = [Server(tmp_path / f"other {number}", "", *shared) for number in range(2)]
    try:
        for number in range(answers):
            rng = random.Random(number)
            question = QUESTIONS[number % len(QUESTIONS)].format(rng.randint(2, 99), rng.randint(2, 99))
            victim = Server(tmp_path / f"victim {number}", str(rng.randint(3, 18)), *shared)
            chat, generation = "", ""
            reading: list[tuple[str | None, str]] = []
            try:
                chat = victim.ask(question, seed=number)
                generation = others[0].generation(chat)
                reader = threading.Thread(target=lambda to=reading, name=generation: to.append(others[0].read(name)))
                reader.start()
                victim.process.join(120)
                reader.join(120)
            finally:
                victim.end()
            undisturbed = others[1].ask(question, seed=number)
            # resumed at another replica if the database was unreachable
            while generation := others[1].generation(undisturbed):
                others[1].follow(generation)
            text = others[1].text(chat)
            state, html = reading[0]
            shown = unescape(re.sub("<[^>]*>", "", html.rpartition("</details>")[2]))
            squeezed, is_empty = "".join(text.split()), not text.rpartition("</think>")[2].strip()
            is_shown = squeezed.endswith("".join(shown.split())) and is_empty != bool(shown.strip())
            expected = others[1].text(undisturbed)
            if state != "done" or not is_shown or text != expected:
                differing.append(f"{number}: {state}, shown {shown!r}, {text!r} for {expected!r}")
            print(f"answer {number}: {len(differing)} differ so far", flush=True)
    finally:
        for each in others:
            each.end()
    ledger.note(
        "cluster",
        "replica killed while it generates an answer",
        f"kill -9 of the generating replica, one of three, in {answers} answers: another one continues, a reader at the"
        " third misses nothing and sees nothing twice, and the text equals the undisturbed one",
        len(differing),
    )
