"""Threads that come late, to bring races out. Python loads this file at its start where `hunt.py` has put its folder on
the path, in every process that a test starts; FORCED_DELAYS is the seed.

A share of the places where one thread hands something to another waits for a moment: where work begins and ends in an
executor, a thread starts, an event is set, a waiter wakes, an event loop is called from outside. Whoever relies on the
order in which that usually happens fails here.
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
"""Of all places passed, those that wait."""

LONGEST_S = 0.03
"""Three to six times a tick of the page's threads: longer waits only make the hunt long."""

SWITCH_S = 1e-5
"""How soon another thread may get the interpreter; the server sets its own."""


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
