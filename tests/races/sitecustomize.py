"""Delay threads at random to expose race conditions. Python imports this file at startup in every process of a test, if
`hunt.py` has put its folder on the path; FORCED_DELAYS is the seed.

A share of the handovers between threads waits for a moment: the start and end of work in an executor, the start of a
thread, setting an event, waking a waiter, and calls into an event loop. Code that relies on the usual order fails.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SHARE = 0.1
"""Fraction of the handovers that wait."""

LONGEST_S = 0.03
"""Three to six ticks of the page's threads; longer waits would only slow the search."""

SWITCH_S = 1e-5
"""Switch interval of the interpreter; the server sets its own."""


def install(seed: str) -> None:
    dice, turn = random.Random(f"{seed} {os.getpid()}"), threading.Lock()

    def late() -> None:
        with turn:
            waits, length = dice.random() < SHARE, dice.random()
        if waits:
            time.sleep(length * length * LONGEST_S)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            late()
            try:
                return function(*args, **kwargs)
            finally:
                late()

        return delayed

    submit = ThreadPoolExecutor.submit

    def submit_delayed(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, around(fn), *args, **kwargs)

    for owner, name in (
        (threading.Thread, "run"),
        (threading.Event, "set"),
        (threading.Condition, "wait"),
        (asyncio.BaseEventLoop, "call_soon_threadsafe"),
    ):
        setattr(owner, name, around(getattr(owner, name)))
    ThreadPoolExecutor.submit = submit_delayed  # type: ignore[method-assign, assignment]
    sys.setswitchinterval(SWITCH_S)


if os.environ.get("FORCED_DELAYS"):
    install(os.environ["FORCED_DELAYS"])
