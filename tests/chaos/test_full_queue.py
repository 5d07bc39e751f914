"""A queue at its limit, for as long as one likes: who is refused is told when to come, who waits is served in turn."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import Victim, Witness

from notso.web.values.ids import new_id

LIMIT = 32
CLIENTS = 48
SECONDS = 600.0 if LONG else 1.0
PACE_SECONDS = 0.2 if LONG else 0.02  # of an answer
LOOK_SECONDS = 1.0 if LONG else 0.25  # after which a client asks again, how things are or for a place
POOL_THREADS = 48  # those of the event loop's pool and ours stay, once they were needed
MORE = """
begun = open(settings.pop("order"), "a", buffering=1)

def script(messages, thinking):
    print(messages[-1].content, file=begun)
    yield from say("yes")
"""


class Visitor:
    """Asks in a chat of its own, waits for the answer, asks again; refused, it comes back sooner than it was told."""

    def __init__(self, server: Victim, name: str, accepted: list[str], pause: float = 0.0) -> None:
        self.client = httpx.Client(base_url=server.url, timeout=120)
        self.name, self.accepted, self.pause = name, accepted, pause
        self.served = self.refused = self.failed = 0
        self.chat = "/chats"

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            words = f"{self.name}-{self.served}"
            path = self.chat if self.chat == "/chats" else f"{self.chat}/messages"
            answer = self.client.post(path, data={"text": words, "key": new_id()})
            if answer.status_code == 429:
                self.refused += 1
                self.failed += not 1 <= int(answer.headers.get("retry-after", "0")) <= 60
                over.wait(LOOK_SECONDS)
            elif answer.status_code == 303:
                self.accepted.append(words)
                self.chat = answer.headers["location"]
                self.until_answered()
                self.served += 1
                over.wait(self.pause)
            else:
                self.failed += 1
        self.client.close()

    def until_answered(self) -> None:
        deadline = time.monotonic() + 300
        while re.search(r'data-state="(queued|running)"', self.client.get(self.chat).text):
            if time.monotonic() > deadline:
                self.failed += 1
                return
            time.sleep(LOOK_SECONDS)


def _seen(heavy: list[Visitor], light: Visitor) -> bool:
    """Both sides of the limit; the light user's turn comes in its own time, which only the long form has."""
    return any(each.refused for each in heavy) and any(each.served for each in heavy) and bool(light.served or not LONG)


def test_a_full_queue(victim: Callable[..., Victim], ledger: Ledger, tmp_path: Path) -> None:
    order = tmp_path / "order"
    server = victim(MORE, pace_seconds=PACE_SECONDS, order=str(order))
    accepted: list[str] = []
    over = threading.Event()
    with Witness(server) as witness:
        base = server.descriptors(), server.threads()
        heavy = [Visitor(server, f"heavy{number}", accepted) for number in range(CLIENTS)]
        light = Visitor(server, "light", accepted, pause=0.5)
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            running = [pool.submit(visitor.run, over) for visitor in (*heavy, light)]
            began = time.monotonic()
            try:
                while time.monotonic() - began < SECONDS or not _seen(heavy, light):
                    assert time.monotonic() - began < SECONDS + 180, "nobody was refused, or the light user forgotten"
                    time.sleep(0.1)
            finally:
                over.set()
            for each in running:
                each.result()
    begun = order.read_text().split()
    place = {words: number for number, words in enumerate(begun)}
    late = sum(abs(place[words] - number) > CLIENTS for number, words in enumerate(accepted))
    unserved = len(set(accepted) - set(begun))
    visitors = [*heavy, light]
    left = until_at_base(server, base)
    ledger.note(
        "clients",
        "a queue at its limit",
        f"{CLIENTS} clients for {SECONDS:g} s: {len(accepted):,} turns served in their order,"
        f" {sum(each.refused for each in visitors):,} refused with the time to wait; a light user had {light.served}"
        f" answers, each other {sum(each.served for each in heavy) / CLIENTS:.0f}",
        sum(each.failed for each in visitors) + late + unserved + left,
        witness.figures,
    )


def test_a_burst_does_not_pass_the_limit(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """All at once while nothing waits: each is looked at before any of them is in the queue."""
    server = victim(pace_seconds=600.0)

    def ask(number: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/chats", f"text=x&key={new_id()}", headers)
        status = connection.getresponse().status
        connection.close()
        return status

    with ThreadPoolExecutor(120) as pool:
        statuses = list(pool.map(ask, range(120)))
    accepted = statuses.count(303)
    ledger.note(
        "clients",
        "questions all at once while nothing waits",
        f"{len(statuses)} at once: {accepted} accepted, {statuses.count(429)} refused",
        max(0, accepted - LIMIT - 1) + sum(status not in (303, 429) for status in statuses),
    )


def until_at_base(server: Victim, base: tuple[int, int]) -> int:
    """1 if descriptors or threads stay above what they were before: connections end in their own time."""
    deadline = time.monotonic() + 60
    while server.descriptors() > base[0] + 2 or server.threads() > base[1] + POOL_THREADS:
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.2)
    return 0
