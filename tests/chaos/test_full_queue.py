"""A queue at its limit for any length of time: refused clients learn when to retry, waiting ones are served in
order."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from chaos.ledger import LONG, Ledger
from chaos.victim import Victim, Witness

from notso.web.values.ids import new_id

LIMIT = 32
CLIENTS = 48
SECONDS = float(os.environ.get("QUEUE_SECONDS", "600")) if LONG else 1.0
PACE_SECONDS = 0.2  # seconds per answer; long enough that all clients ask before the first answer ends
LOOK_SECONDS = 1.0 if LONG else 0.25  # seconds after which a refused client retries
POOL_THREADS = 48  # thread pools of the event loop and of the server, which keep their threads
MORE = """
begun = open(settings.pop("order"), "a", buffering=1)

def script(messages, thinking):
    print(messages[-1].content, file=begun)
    yield from say("yes")
"""


class Visitors:
    """Runs `visitors.py` inside the context and counts its reports by kind and visitor."""

    def __init__(self, server: Victim) -> None:
        self.accepted: list[str] = []
        self.did: dict[str, Counter[str]] = {kind: Counter() for kind in ("accepted", "served", "refused", "failed")}
        self.failures: list[str] = []
        command = (sys.executable, Path(__file__).with_name("visitors.py"), server.url, str(CLIENTS), str(LOOK_SECONDS))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reading = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Visitors:
        self._reading.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reading.join()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, name, *more = line.split()
            self.did[what][name] += 1
            if what == "accepted":
                self.accepted += more
            if what == "failed":
                self.failures.append(line)

    @property
    def seen(self) -> bool:
        """Whether requests were both refused and served; at full length, the light user must have been served too."""
        served = self.did["served"]
        return bool(self.did["refused"] and served and (served["light"] or not LONG))


def test_full_queue_serves_accepted_requests_in_order(
    victim: Callable[..., Victim], ledger: Ledger, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    server = victim(MORE, pace_seconds=PACE_SECONDS, order=str(order))
    with Witness(server) as witness:
        base = server.descriptors(), server.threads()
        with Visitors(server) as visitors:
            began = time.monotonic()
            while time.monotonic() - began < SECONDS or not visitors.seen:
                assert time.monotonic() - began < SECONDS + 180, (
                    "no client was refused, or the light user was never served"
                )
                time.sleep(0.1)
    begun = order.read_text().split()
    place = {words: number for number, words in enumerate(begun)}
    accepted, served = visitors.accepted, visitors.did["served"]
    late = sum(abs(place[words] - number) > CLIENTS for number, words in enumerate(accepted))
    unserved = len(set(accepted) - set(begun))
    left = until_at_base(server, base)
    print(*visitors.failures[:20], sep="")
    ledger.note(
        "clients",
        "full queue",
        f"{CLIENTS} clients for {SECONDS:g} s: {len(accepted):,} turns served in order,"
        f" {visitors.did['refused'].total():,} refused with a Retry-After time; a light user got {served['light']}"
        f" answers, every other user {(served.total() - served['light']) / CLIENTS:.0f}",
        len(visitors.failures) + late + unserved + left,
        witness.figures,
    )


def test_burst_of_requests_does_not_exceed_queue_limit(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """All requests arrive while the queue is empty, so each is checked before any other is queued."""
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
        "many questions at once with an empty queue",
        f"{len(statuses)} at once: {accepted} accepted, {statuses.count(429)} refused",
        max(0, accepted - LIMIT - 1) + sum(status not in (303, 429) for status in statuses),
    )


def until_at_base(server: Victim, base: tuple[int, int]) -> int:
    """Return 1 if descriptors or threads stay above their earlier numbers; connections may take a while to close."""
    deadline = time.monotonic() + 60
    while server.descriptors() > base[0] + 2 or server.threads() > base[1] + POOL_THREADS:
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.2)
    return 0
