"""kill -9 while documents are uploaded, parsed, read by the demo model, asked about and deleted.

No document is half stored, and nothing acknowledged is lost: no file, text, question, answer or deletion. Documents and
answers that a kill interrupts are completed after the restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, DEMO, Victim
from documents.made import text_pdf

from notso.web.store.protocol import MOST_TRIES
from notso.web.values.ids import new_id

KILLS = int(os.environ.get("KILLED_DOCUMENTS", "100" if LONG else "2"))
WORDS = ["heron", "stork", "crane", "reeds", "water", "fish", "frog", "nest", "river", "morning", "grey", "slow"]
SECONDS = 180
"""A test that takes longer than this has hung."""


@dataclass
class Acknowledged:
    """What the server has acknowledged. `unsure`: sent without a response, so it may be stored or not."""

    # id -> (sha256, a word that no other document contains)
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    questions: dict[str, str] = field(default_factory=dict)  # key -> text
    chats: dict[str, str] = field(default_factory=dict)  # key -> path
    answers: dict[str, str] = field(default_factory=dict)  # key -> text
    deleted: dict[str, str] = field(default_factory=dict)  # id -> the document's word
    unsure: set[str] = field(default_factory=set)  # sha256 of the file
    maybe_deleted: set[str] = field(default_factory=set)
    steps: int = 0
    at: str = ""
    killed_at: dict[str, int] = field(default_factory=dict)


def until(client: httpx.Client, address: str, is_so: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + SECONDS
    while not is_so(text := client.get(address).text):
        assert time.monotonic() < deadline, f"{address}: {text[-2000:]}"
        time.sleep(0.01)
    return text


def is_answered(page: str) -> bool:
    return ANSWERED in page


def is_settled(page: str) -> bool:
    """Return whether the answer is complete, or given up after several crashes without a new token (it offers
    Continue)."""
    return is_answered(page) or 'data-state="interrupted"' in page


def is_decided(state: str) -> bool:
    return json.loads(state)["state"] in ("ready", "failed")


def use(server: Victim, rng: random.Random, known: Acknowledged, wrong: list[str]) -> None:
    """Upload, wait for the text, ask, and sometimes delete, until the server is killed."""
    with suppress(httpx.TransportError), httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        while True:
            mark = f"mark{rng.getrandbits(48):x}"
            text = " ".join([*rng.choices(WORDS, k=rng.randint(20, 60)), mark])
            is_pdf = rng.random() < 0.5
            data = text_pdf([text[:60]], [text[60:]]) if is_pdf else text.encode()
            digest = hashlib.sha256(data).hexdigest()
            known.at, known.unsure = "upload", known.unsure | {digest}
            answer = client.post("/documents", params={"name": "a.pdf" if is_pdf else "a.txt"}, content=data)
            if answer.status_code != 201:
                wrong.append(f"upload: {answer.status_code}")
                return
            document = answer.json()["id"]
            known.files[document] = digest, mark
            known.unsure.discard(digest)
            known.steps += 1
            known.at = "parse"
            if rng.random() < 0.3:
                continue  # do not wait, so that several documents are queued
            state = json.loads(until(client, f"/documents/{document}/state", is_decided))
            if state["state"] != "ready":
                wrong.append(f"parse: {state}")
                return
            known.ready.add(document)
            known.steps += 1
            known.at = "ask"
            key = new_id()
            fields = {"text": f"Which birds, {key}?", "key": key, "file-1-name": "a", "file-1-document": document}
            answer = client.post("/chats", data=fields)
            if answer.status_code != 303:
                wrong.append(f"ask: {answer.status_code} {answer.text[:200]}")
                return
            known.questions[key], known.chats[key] = fields["text"], answer.headers["location"]
            known.steps += 1
            known.at = "read"
            until(client, known.chats[key], is_answered)
            known.steps += 1
            if rng.random() < 0.3:
                known.at = "delete"
                known.maybe_deleted.add(document)
                if client.post(f"/documents/{document}/delete", data={}).status_code == 303:
                    known.deleted[document] = mark
                    known.steps += 1


def attack(server: Victim, rng: random.Random, known: Acknowledged) -> list[str]:
    """Use the server and kill it at a random moment."""
    wrong = list[str]()
    user = threading.Thread(target=use, args=(server, rng, known, wrong), daemon=True)
    user.start()
    enough, deadline = known.steps + rng.randint(0, 9), time.monotonic() + SECONDS
    while known.steps < enough and user.is_alive():
        assert time.monotonic() < deadline, (known.at, known.steps)
        time.sleep(0.001)
    time.sleep(rng.random() * 0.1)
    known.killed_at[known.at] = known.killed_at.get(known.at, 0) + 1
    server.kill()
    user.join()
    return wrong


def look(server: Victim, known: Acknowledged, some: list[str]) -> list[str]:
    """Check some documents through the API after a restart; return the errors."""
    wrong = list[str]()
    for each in some:
        digest, mark = known.files[each]
        if each in known.deleted:
            if server.client.get(f"/documents/{each}").status_code != 404:
                wrong.append(f"a deleted document is there: {each}")
            continue
        file = server.client.get(f"/documents/{each}/file")
        if each in known.maybe_deleted and file.status_code == 404:
            known.deleted[each] = mark
            continue
        if hashlib.sha256(file.content).hexdigest() != digest:
            wrong.append(f"a file is lost or changed: {each}, {file.status_code}")
            continue
        state = json.loads(until(server.client, f"/documents/{each}/state", is_decided))
        if state["state"] != "ready" or mark not in server.client.get(f"/documents?q={mark}").text:
            wrong.append(f"a document is not ready or not found: {each}, {state}")
    return wrong


def look_inside(database: Path, known: Acknowledged) -> list[str]:
    """Check the database while no server runs; return the errors."""
    wrong = list[str]()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        wrong += [f"check: {row}" for row in db.execute("PRAGMA integrity_check") if row != ("ok",)]
        states = dict(db.execute("SELECT id, state FROM documents"))
        digests = dict(db.execute("SELECT id, sha256 FROM documents"))
        for each, (digest, _) in known.files.items():
            if each not in known.maybe_deleted and digests.get(each) != digest:
                wrong.append(f"lost: {each}")
            if each in known.deleted and each in states:
                wrong.append(f"not deleted: {each}")
        unknown = digests.keys() - known.files.keys()
        wrong += [f"not uploaded: {each}" for each in unknown if digests[each] not in known.unsure]
        rows = db.execute("SELECT document_id, text FROM document_texts")
        texts = {each: zlib.decompress(text).decode() for each, text in rows}
        half = texts.keys() ^ {each for each, state in states.items() if state == "ready"}
        wrong += [f"half a document: {each}" for each in half]
        marks = {each: mark for each, (_, mark) in known.files.items()}
        wrong += [f"a text without its mark: {each}" for each, text in texts.items() if marks.get(each, "") not in text]
        wrong += [f"was ready: {each}" for each in known.ready - known.maybe_deleted if states.get(each) != "ready"]
        parts = {each for (each,) in db.execute("SELECT DISTINCT document_id FROM document_parts")}
        wrong += [f"parts of no document: {each}" for each in parts - states.keys()]
        held = dict(db.execute("SELECT idempotency_key, content FROM messages WHERE idempotency_key IS NOT NULL"))
        wrong += [f"a question is lost: {key}" for key, text in known.questions.items() if held.get(key) != text]
        done = dict(
            db.execute(
                "SELECT asked.idempotency_key, answer.content FROM messages asked JOIN messages answer"
                " ON answer.parent_id = asked.id WHERE asked.idempotency_key IS NOT NULL AND answer.state = 'done'"
            )
        )
        wrong += [
            f"an answer is lost or changed: {key}" for key in known.answers if done.get(key) != known.answers[key]
        ]
        known.answers.update(done)
        given_up = "SELECT tries FROM messages JOIN answer_traces ON message_id = id WHERE state = 'interrupted'"
        wrong += [f"given up after {tries} tries" for (tries,) in db.execute(given_up) if tries < MOST_TRIES]
        missing = "state = 'interrupted' AND id NOT IN (SELECT message_id FROM answer_traces)"
        wrong += [f"given up untried: {each}" for (each,) in db.execute(f"SELECT id FROM messages WHERE {missing}")]
    return wrong


def test_kills_lose_no_document(tmp_path: Path, victim: Callable[..., Victim], ledger: Ledger) -> None:
    rng, known = random.Random(42), Acknowledged()
    wrong, seen = list[str](), set[str]()
    for number in range(KILLS + 1):
        server = victim(DEMO)
        some_old = rng.sample(sorted(seen), min(10, len(seen)))
        wrong += look(server, known, [*sorted(known.files.keys() - seen), *some_old])
        seen = set(known.files)
        if number < KILLS:
            wrong += attack(server, rng, known)
        else:
            for key in known.questions.keys() - known.answers.keys():
                until(server.client, known.chats[key], is_settled)
        server.kill()
        server.close()
        wrong += look_inside(tmp_path / "data" / "notso.db", known)
        assert not wrong, (number, wrong)
    print(known.killed_at, len(known.files), len(known.questions), len(known.answers), len(known.deleted))
    ledger.note(
        "store",
        "kill -9: document lost, incomplete or back after its deletion; question or answer lost",
        f"{KILLS} kills ({', '.join(f'{each} {count}' for each, count in sorted(known.killed_at.items()))}),"
        f" {len(known.files)} documents, {len(known.questions)} questions, {len(known.answers)} answers",
        len(wrong),
    )
