"""kill -9 at random points under load: all acknowledged data is stored exactly once, and a resent form adds no turn.

Each client is a user, or a program that stores its responses; it records what the server has acknowledged.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import Victim

from notso.web.values.ids import new_id

KILLS = 100 if LONG else 2
PEOPLE, PROGRAMS = 3, 2


@dataclass
class Acknowledged:
    """What the server has acknowledged over all kills, and what was sent without a response."""

    titles: dict[str, str] = field(default_factory=dict)  # path of a chat -> its last title
    asked: dict[str, tuple[str, str]] = field(default_factory=dict)  # key of a form -> (chat, text)
    deleted: set[str] = field(default_factory=set)
    maybe_deleted: set[str] = field(default_factory=set)
    responses: dict[str, str] = field(default_factory=dict)  # id -> text of the response
    unsure: dict[str, tuple[str, str]] = field(default_factory=dict)  # key -> (address, text)
    writes: int = 0


def person(server: Victim, rng: random.Random, known: Acknowledged, unexpected: list[str]) -> None:
    """Start chats, ask again, rename, and sometimes delete, until the server is killed."""
    number = 0
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while True:
                number += 1
                chat, text, key = "", f"first {new_id()}", new_id()
                known.unsure[key] = "/chats", text
                answer = client.post("/chats", data={"text": text, "key": key})
                if answer.status_code != 303:
                    unexpected.append(f"{answer.status_code} to a question")
                    return
                chat = answer.headers["location"]
                del known.unsure[key]
                known.asked[key] = chat, text
                known.writes += 1
                title = f"title {new_id()}"
                if client.post(f"{chat}/title", data={"title": title}).status_code in (200, 204, 303):
                    known.titles[chat] = title
                    known.writes += 1
                if rng.random() < 0.2:
                    known.maybe_deleted.add(chat)
                    if client.post(f"{chat}/delete", data={}).status_code in (200, 204, 303):
                        known.deleted.add(chat)
                        known.writes += 1
                    continue
                text, key = f"second {new_id()}", new_id()
                known.unsure[key] = f"{chat}/messages", text
                answer = client.post(f"{chat}/messages", data={"text": text, "key": key})
                del known.unsure[key]
                if answer.status_code == 303:
                    known.asked[key] = chat, text
                    known.writes += 1
                elif answer.status_code != 409:  # 409: the first answer is still being written
                    unexpected.append(f"{answer.status_code} to a second question")
    except httpx.TransportError:
        pass


def program(server: Victim, rng: random.Random, known: Acknowledged, unexpected: list[str]) -> None:
    """Create stored responses, each continuing the one before, whole or streamed, until the server is killed."""
    previous: str | None = None
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while True:
                text, stream = f"keep {new_id()}", rng.random() < 0.5
                body = {"input": text, "previous_response_id": previous, "stream": stream}
                answer = client.post("/v1/responses", json=body)
                if answer.status_code != 200:
                    unexpected.append(f"{answer.status_code} to a program: {answer.text[:200]}")
                    return
                if stream and "event: response.completed" not in answer.text:
                    continue
                named = re.findall(r'"id":\s*"(resp_[^"]+)"', answer.text)
                previous = named[0]
                known.responses[previous] = text
                known.writes += 1
    except httpx.TransportError:
        pass


def look(server: Victim, known: Acknowledged, keys: list[str], responses: list[str]) -> list[object]:
    """Check through the API that these questions and responses are stored; return the errors."""
    wrong: list[object] = []
    client = server.client
    for key in keys:
        chat, text = known.asked[key]
        if chat in known.maybe_deleted:
            continue
        page = client.get(chat)
        if page.status_code != 200 or text not in page.text:
            wrong.append((chat, "a question is lost", page.status_code))
            continue
        address = "/chats" if text.startswith("first") else f"{chat}/messages"
        again = client.post(address, data={"text": text, "key": key})
        if again.status_code != 303 or again.headers["location"] != chat:
            wrong.append((chat, "acknowledged form sent again", again.status_code))
    for key, (address, text) in known.unsure.items():  # resend as a browser does; afterwards it must be stored once
        for _ in range(2):
            again = client.post(address, data={"text": text, "key": key})
            if again.status_code not in (303, 409):
                wrong.append((address, "unanswered form sent again", again.status_code))
        if again.status_code == 303:
            known.asked[key] = again.headers["location"], text
    known.unsure.clear()
    for name in responses:
        kept = client.get(f"/v1/responses/{name}")
        if kept.status_code != 200 or known.responses[name] not in kept.text:
            wrong.append((name, "a response is lost", kept.status_code))
    return wrong


def look_inside(database: Path, known: Acknowledged) -> list[object]:
    """Check everything in the database file after the last kill; return the errors."""
    db = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    wrong: list[object] = [("check", row) for row in db.execute("PRAGMA integrity_check") if row != ("ok",)]
    held = dict(db.execute("SELECT idempotency_key, content FROM messages WHERE idempotency_key IS NOT NULL"))
    titles = dict(db.execute("SELECT id, title FROM chats WHERE trash_id IS NULL"))
    twice = "SELECT content FROM messages WHERE role = 'user' GROUP BY content HAVING count(*) > 1"
    wrong += [("twice", row) for row in db.execute(twice)]
    for key, (chat, text) in known.asked.items():
        if chat not in known.maybe_deleted and held.get(key) != text:
            wrong.append(("question", chat, key))
    for chat, title in known.titles.items():
        if chat not in known.maybe_deleted and titles.get(chat.removeprefix("/chats/")) != title:
            wrong.append(("title", chat, title))
    wrong += [("deleted", chat) for chat in known.deleted if chat.removeprefix("/chats/") in titles]
    wrong += [
        ("half a turn", row)
        for row in db.execute(
            "SELECT id FROM messages asked WHERE role = 'user' AND trash_id IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM messages WHERE parent_id = asked.id)"
        )
    ]
    db.close()
    return wrong


def converse(server: Victim) -> list[object]:
    """Check that a named stream, which belongs to one process, is unknown after a kill and can be requested once
    more."""
    body = {"messages": [{"role": "user", "content": "by name"}], "stream": True}
    before = server.client.get("/v1/stream", params={"conv_id": "named"}).status_code
    asked = server.client.post("/v1/chat/completions", json=body, headers={"X-Conversation-Id": "named"})
    again = server.client.get("/v1/stream", params={"conv_id": "named"})
    well = before == 404 and asked.status_code == 200 and again.text.count("[DONE]") == 1
    return [] if well else [("a named stream", before, asked.status_code, again.status_code)]


def attack(server: Victim, known: Acknowledged, rng: random.Random) -> list[str]:
    """Run clients until a random moment after the tenth write, then kill the server. Return unexpected responses."""
    unexpected: list[str] = []
    clients = [
        threading.Thread(target=each, args=(server, random.Random(rng.random()), known, unexpected), daemon=True)
        for each in [person] * PEOPLE + [program] * PROGRAMS
    ]
    for client in clients:
        client.start()
    enough, deadline = known.writes + 10, time.monotonic() + 120
    while known.writes < enough:
        assert time.monotonic() < deadline, (known.writes, unexpected)
        time.sleep(0.001)
    time.sleep(rng.random() * 0.3)
    server.kill()
    for client in clients:
        client.join()
    return unexpected


def test_kills_lose_no_acknowledged_writes(tmp_path: Path, victim: Callable[..., Victim], ledger: Ledger) -> None:
    rng, known = random.Random(9), Acknowledged()
    wrong: list[object] = []
    seen_keys: set[str] = set()
    seen_responses: set[str] = set()
    for number in range(KILLS + 1):
        server = victim()
        some_old = rng.sample(sorted(seen_keys), min(20, len(seen_keys)))
        new_keys, new_responses = set(known.asked) - seen_keys, set(known.responses) - seen_responses
        wrong += look(server, known, [*new_keys, *some_old], sorted(new_responses))
        if "are missing from the database" in server.client.get("/").text:
            wrong.append("a loss is reported although nothing was lost")
        seen_keys, seen_responses = set(known.asked), set(known.responses)
        wrong += converse(server)
        if number < KILLS:
            wrong += attack(server, known, rng)
        server.kill()
        server.close()
    wrong += look_inside(tmp_path / "data" / "notso.db", known)
    print(*wrong, sep="\n")
    ledger.note(
        "store",
        "kill -9: acknowledged write lost or duplicated, incomplete turn, second turn after a form is sent again",
        f"{KILLS} kills under load of {PEOPLE} users and {PROGRAMS} programs, {known.writes} acknowledged writes"
        f" ({len(known.asked)} questions, {len(known.responses)} responses), forms sent again after each kill",
        len(wrong),
    )
