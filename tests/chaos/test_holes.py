"""Attacks with one key while another user works: each of these once stopped the server or starved other users.

At full length each attack has its own server and lasts `SECONDS`; SIGTERM arrives in the middle. In the short form all
attacks share one server and run one after the other.
"""

from __future__ import annotations

import http.client
import json
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, DEMO, Victim, Witness, new_key
from plugins.false_plugin import PACKETS
from plugins.installed_plugins import install
from web.engine.remote.test_engine_link import FalseEngine

from notso.web.values.ids import new_id

SECONDS = 10.0 if LONG else 0.0  # each attack runs at least once
DRAIN_SECONDS = 2.0
EXIT_SECONDS = DRAIN_SECONDS + 5.0
LOST = 0
MIB = 1 << 20
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Content-Type": "application/json"}
KEYS_WANTED = """
from notso.web.values.sign_in import OidcSettings, SignInSettings
oidc = OidcSettings(issuer="http://127.0.0.1:9", client_id="notso", public_url="http://127.0.0.1")
settings["sign_in"] = SignInSettings(require_key=True, oidc=oidc)
"""
FORGING = """
from functools import partial
from notso.plugins.process import Plugins
from notso.smollm3 import Event, ToolCall
serve = partial(serve, plugins=Plugins(("forger",)))

def script(messages, thinking):
    asked = messages[-1]
    if asked.role == "tool" or not asked.content.startswith("call "):
        yield from say("fine")
    else:
        yield Event("tool_call", tool_call=ToolCall("call_1", asked.content.split()[1], "{}"))
"""


class Rival:
    """An attacker that sends requests with a key, each on its own connection.

    It uses plain connections: a client library would slow the witness, which runs in this process.
    """

    def __init__(self, server: Victim, headers: Mapping[str, str]) -> None:
        self.server = server
        self._headers = dict(headers)
        self.statuses: list[int] = []

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, str]:
        """Return status, body and `Location`; the status is LOST if the connection broke."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            connection.request(method, path, body, self._headers | dict(headers or {}))
            answer = connection.getresponse()
            told = answer.status, answer.read(), answer.headers.get("Location", "")
        except (OSError, http.client.HTTPException):
            told = LOST, b"", ""
        finally:
            connection.close()
        self.statuses.append(told[0])
        return told

    def get(self, path: str) -> tuple[int, bytes, str]:
        return self.ask("GET", path)

    def form(self, path: str, **fields: str) -> tuple[int, bytes, str]:
        return self.ask("POST", path, urlencode(fields).encode(), FORM)

    def json(self, path: str, value: Any) -> tuple[int, bytes, str]:
        return self.ask("POST", path, json.dumps(value, ensure_ascii=False).encode(), JSON)

    def at_once(self, many: int, job: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(many) as threads:
            for done in [threads.submit(job, number) for number in range(many)]:
                done.result()


def chat_of(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"model": "smollm3", "messages": [{"role": "user", "content": text}], "max_tokens": 2} | more


def schema_of(pattern: str) -> dict[str, Any]:
    properties = {"a": {"type": "string", "pattern": pattern}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def system_texts(rival: Rival) -> None:
    """system prompts that patterns for volatile lines could match in many ways"""
    for text in ("a=a" * 40 + "!", "a=a;" * 30_000 + "!", "a=" * 60_000, " ;" * 60_000 + "="):
        rival.json("/v1/messages", chat_of(system="x-anthropic-billing-header:" + text))


def patterns(rival: Rival) -> None:
    """schemas with patterns of 24 kB of brackets"""
    for unit in ("[", "(", "(?:", "\\u{", "[^", "a{1,", "|", "\\", "[[:") if LONG else ("[", "(?:"):
        rival.json("/v1/chat/completions", chat_of(**schema_of(unit * (24_000 // len(unit)))))


def grammars(rival: Rival) -> None:
    """grammars with 40 kB of brackets and quotes"""
    for unit in ('"\\', "/\\", "[", "(", "{", '"', "/", "%", "//", "#\n") if LONG else ('"\\', "["):
        text = unit * (40_000 // len(unit))
        rival.json("/v1/chat/completions", chat_of(structured_outputs={"grammar": f"start: {text}"}))
        rival.json("/v1/chat/completions", chat_of(grammar=f"root ::= {text}"))
        rival.json("/v1/chat/completions", chat_of(structured_outputs={"regex": text}))


def tokens(rival: Rival) -> None:
    """tokenizing a text of 1 MB, with the text of each token"""
    size = MIB if LONG else MIB // 4
    for text in ("pieces, ", "\u00e9\u0301\u4e2d"):
        rival.json("/tokenize", {"content": text * (size // 9), "with_pieces": True})


def choices(rival: Rival) -> None:
    """16 answers with 20 log probabilities for each token"""
    body: dict[str, Any] = {
        "n": 16,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 200 if LONG else 8,
        "ignore_eos": True,
    }
    rival.json("/v1/chat/completions", chat_of(**body))


def previews(rival: Rival) -> None:
    """previews of unclosed elements: 7 of 110 kB and one of 230 kB at once"""
    sizes = [110_000] * 7 + [230_000] if LONG else [60_000] * 3
    rival.at_once(len(sizes), lambda at: rival.form("/preview", text="<b id=x>" * (sizes[at] // 8)))


def a_large_chat(rival: Rival) -> None:
    """page views, estimates, exports and searches of a chat of 13 MiB"""
    turns = 12_400 if LONG else 100
    messages = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"q{number} " + "lorem ipsum " * 45})
        messages.append({"role": "assistant", "content": f"a{number} " + "dolor sit " * 50})
    status, told, chat = rival.json("/import", {"messages": messages})
    assert status == 303, told[:300]
    rival.at_once(6, lambda _: rival.get(chat))
    rival.at_once(4, lambda _: rival.form(f"{chat}/estimate", text="x", thinking="on"))
    rival.at_once(4, lambda _: rival.get(f"{chat}/export/md"))
    rival.at_once(2, lambda _: rival.get("/export"))
    rival.at_once(6, lambda at: rival.get(f"/search?q=lorem+a{at}"))
    rival.form(f"{chat}/delete")


def many_chats(rival: Rival) -> None:
    """pages, archive and 60 searches with 10,000 chats"""
    most, of_one = (10_000, 2_000) if LONG else (200, 200)
    if b"chat 7 " not in rival.get("/search?q=chat")[1]:
        asked = {"id": "q", "parent_id": None, "chosen_child": "a", "role": "user", "content": "a question"}
        answered = {"id": "a", "parent_id": "q", "role": "assistant", "content": "an answer"}
        turn = {"prompt_date": "2026-01-01", "chosen_root": "q", "messages": [asked, answered]}
        chats = [turn | {"title": f"chat {at} "} for at in range(of_one)]
        for _ in range(most // of_one):
            status, told, _ = rival.json("/import", {"format": "notso-chats", "version": 2, "chats": chats})
            assert status == 303, told[:300]
    rival.at_once(6, lambda _: rival.get("/"))
    rival.at_once(4, lambda _: rival.get("/archive"))
    rival.at_once(12, lambda at: [rival.get(f"/search?q=question+{at}") for _ in range(5 if LONG else 1)])


def long_requests(rival: Rival) -> None:
    """70 long requests of one key"""
    most = 1_500 if LONG else 60
    body = {"model": "smollm3", "prompt": "one", "max_tokens": most, "ignore_eos": True}
    rival.at_once(70 if LONG else 20, lambda _: rival.json("/v1/completions", body))


def callbacks(rival: Rival) -> None:
    """forged returns from a sign-in provider"""
    stranger = Rival(rival.server, {})
    stranger.statuses = rival.statuses
    many = 250 if LONG else 10
    stranger.at_once(4, lambda at: [stranger.get(f"/login/oidc/callback?code={at}&state=x") for _ in range(many)])


def guessed_keys(rival: Rival) -> None:
    """620 guessed keys"""
    stranger = Rival(rival.server, {})
    stranger.statuses = rival.statuses
    stranger.at_once(
        4,
        lambda _: [
            stranger.ask("GET", "/v1/models", None, {"x-api-key": new_id()}) for _ in range(155 if LONG else 10)
        ],
    )


def sign_ins(rival: Rival) -> None:
    """repeated sign-ins with one key"""
    key = rival._headers["Authorization"].removeprefix("Bearer ")
    many = 500 if LONG else 10
    rival.at_once(4, lambda _: [rival.form("/login", api_key=key) for _ in range(many)])


def broken_chunks(rival: Rival) -> None:
    """bodies with broken chunks"""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    head += f"Authorization: {rival._headers['Authorization']}\r\n\r\n"
    for chunk in (b"zz\r\n{}\r\n", b"-1\r\n", b"5\r\nabcdefgh\r\n", b"ffffffffffffffffff\r\n", b"\x00" * 64):
        for _ in range(200 if LONG else 5):
            with rival.server.connect() as client:
                try:
                    client.sendall(head.encode() + chunk)
                    client.recv(4096)
                except OSError:
                    pass


ATTACKS: dict[str, Callable[[Rival], None]] = {
    attack.__name__: attack
    for attack in (
        system_texts,
        patterns,
        grammars,
        tokens,
        choices,
        previews,
        a_large_chat,
        many_chats,
        long_requests,
        callbacks,
        guessed_keys,
        sign_ins,
        broken_chunks,
    )
}


def attacked(rival: Rival, attack: Callable[[Rival], None]) -> tuple[dict[str, float], str, int]:
    """Run the attack beside a witness; return the figures, a description, and the number of failures.

    Failures are lost requests and server errors. A question that is never answered raises at once. At full length the
    figures contain the seconds from SIGTERM to the exit.
    """
    server, over, rounds = rival.server, threading.Event(), 0
    rival.statuses.clear()

    def run() -> None:
        nonlocal rounds
        while not over.is_set():
            attack(rival)
            rounds += 1
            if not LONG:
                return

    asked = 0
    with ThreadPoolExecutor(1) as thread:
        with Witness(server) as witness:
            began = time.monotonic()
            attacking = thread.submit(run)
            while not asked or (LONG and not attacking.done() and (time.monotonic() - began < SECONDS or not rounds)):
                asked += 1
                server.wait_for(ANSWERED, server.ask("an ordinary question"))
                over.wait(1.0 if LONG else 0.0)
            if not LONG:
                attacking.result()
        statuses = list(rival.statuses)
        failed = sum(status == LOST or (status >= 500 and status != 503) for status in statuses)
        tried = f"{rounds} times, with {asked} questions of another user at the same time"
        figures = witness.figures
        if LONG:
            assert not attacking.done(), attacking.exception()
            figures["exit s"] = ended_seconds(server)
            failed += figures["exit s"] > EXIT_SECONDS
            over.set()
            attacking.exception()  # the attack was interrupted
            tried += ", and SIGTERM in the middle"
        print(Counter(statuses), figures)
    return figures, tried, failed


def ended_seconds(server: Victim) -> float:
    """Return the seconds from SIGTERM to the exit."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(120)
    return time.monotonic() - began


def begun(folder: Path, more: str = "", **settings: Any) -> Rival:
    """Start a server with keys for the witness and the attacker, and return the attacker."""
    mine, theirs = new_key(folder, "witness", is_operator=True), new_key(folder, "rival")
    server = Victim(folder, KEYS_WANTED + more, headers=mine, drain_seconds=DRAIN_SECONDS, **settings)
    return Rival(server, theirs)


@pytest.fixture(scope="function" if LONG else "module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rival]:
    """An attacker of a server with the demo model."""
    rival = begun(tmp_path_factory.mktemp("data"), DEMO)
    yield rival
    if rival.server.process.poll() is None:
        ended_seconds(rival.server)
    rival.server.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Rival]]:
    """Return a function that starts servers whose engine echoes the question."""
    rivals: list[Rival] = []

    def start(more: str = "", **settings: Any) -> Rival:
        rivals.append(begun(tmp_path / "data", more, **settings))
        return rivals[-1]

    yield start
    for each in rivals:
        each.server.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_with_one_key_do_not_starve_other_users(computing: Rival, ledger: Ledger, name: str) -> None:
    figures, tried, failed = attacked(computing, ATTACKS[name])
    ledger.note("holes", str(ATTACKS[name].__doc__), tried, failed, figures)


def test_forged_plugin_frames_do_not_disrupt_server(
    started: Callable[..., Rival], ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    rival = started(FORGING)
    packets = list(PACKETS) if LONG else ["of_many_values", "too_large"]

    def attack(rival: Rival) -> None:
        for name in packets:
            rival.server.client.post("/plugins/forger/start")  # as the operator
            rival.form("/tools", **{f"tool-{packet}": "on" for packet in packets})
            chat = rival.form("/chats", text=f"call {name}", key=new_id())[2]
            while ANSWERED.encode() not in (page := rival.get(chat)[1]) and page:
                if asking := re.search(rb"/generations/(\w+)/permission", page):
                    url = f"/generations/{asking[1].decode()}/permission"
                    if call := re.search(rb'name="call" value="([^"]+)"', rival.get(url)[1]):
                        called.append(name)
                        rival.form(url, call=call[1].decode(), answer="once")
                time.sleep(0.05)

    called: list[str] = []
    figures, tried, failed = attacked(rival, attack)
    failed += len(set(packets) - set(called))
    ledger.note("holes", f"frames forged by a plugin: {', '.join(PACKETS)}", tried, failed, figures)


def test_endless_engine_responses_do_not_disrupt_server(started: Callable[..., Rival], ledger: Ledger) -> None:
    engine = FalseEngine()
    try:
        rival = started(engine_url=engine.address, engine_key="a key for front ends only")

        def attack(rival: Rival) -> None:
            rival.at_once(4, lambda at: rival.form("/estimate", text=f"text {at}"))
            rival.at_once(4, lambda at: rival.json("/tokenize", {"content": f"text {at}"}))

        engine.endless = True
        figures, tried, failed = attacked(rival, attack)
    finally:
        engine.close()
    figures |= {"sent MB": engine.sent / 1e6}
    ledger.note("holes", "endless responses of an engine", tried, failed, figures)


@pytest.mark.long("chaos")
def test_imports_beyond_address_space_limit_do_not_crash_server(started: Callable[..., Rival], ledger: Ledger) -> None:
    """The limit is set after the server has started all its threads, 300 MB above its address space at that time."""
    rival = started()
    rival.at_once(20, lambda _: rival.json("/import", [{"role": "user", "content": "?"}]))
    with Witness(rival.server):
        rival.at_once(20, lambda _: rival.get("/"))
    pid = rival.server.pid
    taken = int(re.findall(r"^VmSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0]) * 1024
    resource.prlimit(pid, resource.RLIMIT_AS, (taken + 300 * MIB, resource.RLIM_INFINITY))
    turns = 12_000 if LONG else 3_000
    message = {"role": "user", "content": "lorem ipsum " * 45}, {"role": "assistant", "content": "dolor sit " * 50}
    body = json.dumps({"messages": message * turns}).encode()

    def attack(rival: Rival) -> None:
        rival.at_once(6, lambda _: rival.ask("POST", "/import", body, JSON))

    figures, tried, failed = attacked(rival, attack)
    fault = (
        f"six imports of {len(body) / 1e6:.0f} MB at once with an address space limit of 300 MB above the server's use"
    )
    ledger.note("holes", fault, tried, failed, figures)
