"""SIGTERM at any moment, while questions arrive and answers are written: no acknowledged data is lost."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import Victim

from notso.web.values.ids import new_id

REPEATS = 60 if LONG else 2
EXIT_SECONDS = 15.0
DRAIN_SECONDS = 0.3
RUNNING = re.compile(r'"state": "(?:queued|running)"')
MORE = """
def script(messages, thinking):
    yield from say("word " * 1000)
"""


def keep_asking(server: Victim, name: str, acknowledged: list[str], begun: threading.Event) -> None:
    """Start new chats without pause until the server is gone."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(1000):
            words = f"{name}-{number}"
            try:
                answer = client.post("/chats", data={"text": words, "key": new_id()})
            except httpx.HTTPError:
                return
            if answer.status_code == 303:
                acknowledged.append(words)
                begun.set()
            elif answer.status_code == 503:
                return


def test_sigterm_under_load_loses_no_acknowledged_questions(victim: Callable[..., Victim], ledger: Ledger) -> None:
    chance = random.Random(7)
    acknowledged: list[str] = []
    failed = 0
    longest = 0.0
    for repeat in range(REPEATS):
        server = victim(MORE, pace_seconds=0.005, drain_seconds=DRAIN_SECONDS)
        begun = threading.Event()
        asking = [
            threading.Thread(target=keep_asking, args=(server, f"r{repeat}c{number}", acknowledged, begun))
            for number in range(3)
        ]
        for each in asking:
            each.start()
        begun.wait(60)
        time.sleep(0.3 * chance.random())
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if repeat % 2:
            time.sleep(0.3 * chance.random())
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        failed += server.process.wait(120) != 0
        longest = max(longest, time.monotonic() - began)
        for each in asking:
            each.join()
        server.close()
    server = victim("")  # unfinished answers are resumed
    while RUNNING.search(exported := json.dumps(server.client.get("/export").json())):
        pass
    found = re.findall(r'"(r\d+c\d+-\d+)"', exported)
    lost = set(acknowledged) - set(found)
    failed += LONG and longest > EXIT_SECONDS
    ledger.note(
        "store",
        "SIGTERM under load, every other time followed by a second one",
        f"{REPEATS} times while questions arrive: {len(acknowledged):,} acknowledged, {len(lost)} lost",
        failed + len(lost),
        {"exit max s": longest},
    )
