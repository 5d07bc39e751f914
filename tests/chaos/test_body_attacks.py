"""Bodies made to be expensive: empty objects, unknown keys, unfinished bodies, and prompts beyond any context."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim, Witness

Start = Callable[..., Victim]

MIB = 1 << 20
TRIES = 8
NOTHING_SAID = -1  # no response within a minute
JSON = {"Content-Type": "application/json"}
DEMO = """
from notso.smollm3 import Engine
ScriptedEngine = lambda *_, **__: Engine.load()
"""
"""Replaces the scripted engine by the demo model, because the cost of a prompt depends on a real tokenizer."""

EMPTY_OBJECTS = b"[" + b"{}," * (16 * MIB // 3 - 2) + b"{}]"


def unknown_keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(count)) + b"}"


def ordinary_import() -> bytes:
    """Return five megabytes of conversation."""
    turn = [
        {"role": "user", "content": "A question, and some words. " * 20},
        {"role": "assistant", "content": "Some words of an answer. " * 140},
    ]
    return json.dumps(turn * 1200).encode()


def head(victim: Victim, path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{victim.port}", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {length}", "Connection: close", "", ""]).encode()


def answers(victim: Victim, path: str, body: bytes, many: int) -> list[int]:
    """Send `many` requests at once, each on its own connection; return the statuses, or 0 for a lost connection.

    Use plain sockets: a client library would slow the witness, which runs in this process.
    """

    def post(_: int) -> int:
        with victim.connect() as client:
            try:
                client.sendall(head(victim, path, len(body)))
                client.sendall(body)
            except OSError:
                pass  # the server may have answered before it has read the whole body
            try:
                return int(client.recv(100).split()[1])
            except TimeoutError:
                return NOTHING_SAID
            except (OSError, IndexError):
                return 0

    with ThreadPoolExecutor(many) as threads:
        return list(threads.map(post, range(many)))


def honest_failures(victim: Victim) -> int:
    """Return how many of an ordinary question, API request and import fail."""
    victim.wait_for(ANSWERED, victim.ask("an ordinary question"))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    asked = victim.client.post("v1/chat/completions", json=body)
    return (asked.status_code != 200) + (not imported(victim))


def imported(victim: Victim) -> bool:
    """Return whether an ordinary import succeeds, with retries after the time in Retry-After. On a slow machine the
    server may cut it off to free memory, possibly without a response."""
    for _ in range(TRIES):
        retry_seconds = 5.0
        with contextlib.suppress(httpx.TransportError):
            answer = victim.client.post("import", content=ordinary_import(), headers=JSON)
            if answer.status_code not in (429, 503):
                return answer.status_code == 303
            retry_seconds = float(answer.headers["retry-after"])
        time.sleep(retry_seconds)
    return False


def attacked(victim: Victim, attack: Callable[[], object], rounds: int) -> tuple[Witness, int]:
    """Run `attack` beside a witness; return the witness and the number of ordinary requests that failed."""
    failed = 0
    with Witness(victim) as witness:
        attacking = threading.Thread(target=lambda: [attack() for _ in range(rounds)], daemon=True)
        attacking.start()
        failed += honest_failures(victim)
        attacking.join()
        failed += honest_failures(victim)
    return witness, failed


def test_server_survives_imports_of_empty_objects(victim: Start, ledger: Ledger) -> None:
    server, many = victim(), 12 if LONG else 4
    seen: list[int] = []
    witness, failed = attacked(server, lambda: seen.extend(answers(server, "/import", EMPTY_OBJECTS, many)), 1)
    ledger.note(
        "clients",
        "imports of 16 MiB of empty objects",
        f"{many} at once; an ordinary question, API request and import of 5 MB during and after the attack",
        failed + sum(status not in (400, 503, 0) for status in seen),  # a body that was cut off may get no response
        witness.figures,
    )


def test_server_survives_bodies_full_of_unknown_keys(victim: Start, ledger: Ledger) -> None:
    server, many = victim(), 40 if LONG else 6
    imported, asked = b"[" + unknown_keys(1_400_000) + b"]", unknown_keys(95_000)
    seen: list[int] = []

    def attack() -> None:
        seen.extend(answers(server, "/import", imported, 1))
        seen.extend(answers(server, "/v1/chat/completions", asked, many))

    witness, failed = attacked(server, attack, 3 if LONG else 1)
    ledger.note(
        "clients",
        "bodies full of unknown keys",
        f"imports of 1,400,000, and {many} requests of 95,000 at once; legitimate requests during and after the attack",
        failed + sum(status not in (400, 503) for status in seen),
        witness.figures,
    )


def test_server_survives_unfinished_request_bodies(victim: Start, ledger: Ledger) -> None:
    server, many = victim(), 100 if LONG else 30
    begun: list[socket.socket] = []
    blanks = b" " * (16 * MIB - 1)

    def begin(_: int) -> None:
        client = server.connect()
        begun.append(client)
        try:
            client.sendall(head(server, "/import", 16 * MIB))
            client.sendall(blanks)
        except OSError:
            return  # refused while it was being sent

    def attack() -> None:
        with ThreadPoolExecutor(many) as threads:
            list(threads.map(begin, range(many)))

    witness, failed = attacked(server, attack, 1)
    for client in begun:
        client.close()
    ledger.note(
        "clients",
        "bodies of 16 MiB whose last byte is never sent",
        f"{many} at once; legitimate requests during and after the attack",
        failed,
        witness.figures,
    )


def test_server_survives_prompts_beyond_context_size(victim: Start, ledger: Ledger) -> None:
    server, many = victim(DEMO), 200 if LONG else 24
    text = "word " * (MIB // 5 - 40)
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    seen: list[int] = []
    witness, failed = attacked(server, lambda: seen.extend(answers(server, "/v1/chat/completions", body, many)), 1)
    refused = server.client.post("v1/chat/completions", content=body, headers=JSON).json()["error"]["code"]
    ledger.note(
        "clients",
        "prompts of 1 MiB, with the real engine",
        f"{many} at once; legitimate requests during and after the attack",
        failed + sum(status not in (400, 429, 503) for status in seen) + (refused != "context_length_exceeded"),
        witness.figures,
    )
