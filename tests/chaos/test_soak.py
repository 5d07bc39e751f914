"""Sixteen chats on the real engine for hours, with readers that come and go: memory and descriptors must not grow."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

from chaos.crowd import Crowd
from chaos.ledger import LONG, Ledger
from chaos.victim import DEMO, Victim

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "7200"))
PAUSE_SECONDS = float(os.environ.get("SOAK_PAUSE", "3"))
SAMPLE_SECONDS = 5.0
FILL_SECONDS = 300.0
WARM_SHARE = 0.25
"""Share of the samples to leave out as warm-up, until bounded caches are full and no longer look like growth. Five
minutes of requests without pauses before the first sample fill most of them."""
BLOCKS = 12
SETTLE_SECONDS = 120.0
T_95 = 2.23
"""Student's t for 95 % and ten degrees of freedom, which a line through twelve blocks has."""


class Samples(threading.Thread):
    """Records seconds since the start, MB of memory, and descriptors at intervals."""

    def __init__(self, victim: Victim) -> None:
        super().__init__(daemon=True)
        self.rows: list[tuple[float, float, int]] = []
        self.over = threading.Event()
        self._victim = victim

    def run(self) -> None:
        began = time.monotonic()
        while not self.over.wait(SAMPLE_SECONDS):
            self.rows.append((time.monotonic() - began, self._victim.memory_mb(), self._victim.descriptors()))


def slope_mb_per_hour(rows: list[tuple[float, float, int]]) -> tuple[float, float]:
    """Fit a line through the median memory of blocks after the warm-up; return its slope and half the 95 % interval.

    A block is minutes long, so the memory of a single request does not count as growth.
    """
    rows = rows[int(WARM_SHARE * len(rows)) :]
    size = len(rows) // BLOCKS
    blocks = [rows[n * size : (n + 1) * size] for n in range(BLOCKS)]
    hours = [statistics.mean(row[0] for row in block) / 3600 for block in blocks]
    memory = [statistics.median(row[1] for row in block) for block in blocks]
    slope, start = statistics.linear_regression(hours, memory)
    spread = sum((mb - start - slope * hour) ** 2 for hour, mb in zip(hours, memory, strict=True)) / (BLOCKS - 2)
    middle = statistics.mean(hours)
    return slope, T_95 * (spread / sum((hour - middle) ** 2 for hour in hours)) ** 0.5


POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""asyncio's own thread pool grows to this size over time and keeps its threads."""


def _more_than(settled: tuple[int, int], server: Victim) -> tuple[int, int]:
    return max(0, server.threads() - settled[0] - POOL_THREADS), max(0, server.descriptors() - settled[1])


def test_sixteen_chats_leak_no_memory_threads_or_descriptors(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """Bounded buffers are full before the first sample: 160 recorded steps of 20 KB, the engine's blocks, SQLite's
    pages, 64 finished turns, and what malloc keeps for each thread between two trims. Before the server trimmed, the
    last alone added 1.3 MB an hour."""
    server = victim(DEMO)
    if LONG:
        Crowd(server, seed=0).run(seconds=FILL_SECONDS)
    else:
        Crowd(server, seed=0).run(turns=1)  # create everything that is created only once
    settled, names = (server.threads(), server.descriptors()), server.descriptor_names()
    samples, crowd = Samples(server), Crowd(server, seed=1, pause_seconds=PAUSE_SECONDS if LONG else 0.0)
    figures: dict[str, float] = {}
    if LONG:
        samples.start()
        crowd.run(seconds=SOAK_SECONDS)
        samples.over.set()
        samples.join()
        slope, noise = slope_mb_per_hour(samples.rows)
        figures = {"slope MB/h": slope, "its noise MB/h": noise, "memory MB": samples.rows[-1][1]}
        if slope > max(noise, 1.0):
            crowd.failed[f"memory grows by {slope:.1f} MB/h, noise {noise:.1f}"] += 1
    else:
        crowd.run(turns=1)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (more := _more_than(settled, server)) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    figures |= {"threads more": more[0], "descriptors more": more[1]}
    if more != (0, 0):
        left = dict(server.descriptor_names() - names)
        crowd.failed[f"threads or descriptors are left: {left}"] += 1
    done = ", ".join(f"{count:,} {what}" for what, count in sorted(crowd.done.items()))
    how_long = f"{SOAK_SECONDS / 3600:g} hours" if LONG else "one turn each"
    ledger.note("soak", f"16 chats, {how_long}{': ' + str(dict(crowd.failed)) if crowd.failed else ''}", done,
                sum(crowd.failed.values()), figures)  # fmt: skip
