"""Pause an engine while a test prepares requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from notso.smollm3 import Engine


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Pause the engine. Requests submitted meanwhile start together at the end, after readers have subscribed."""
    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        release.wait(60)

    holding = threading.Thread(target=engine._core.call, args=(hold,))
    holding.start()
    assert is_held.wait(60)
    try:
        yield
    finally:
        release.set()
        holding.join(60)
