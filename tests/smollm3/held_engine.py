"""Pause an engine while a test prepares requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from notso.smollm3 import Engine
from notso.smollm3.engine.request import Request


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


def close_at_submit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine begin to close when a request has been submitted, before its first step."""
    submit = engine._core.submit

    def submit_and_close(request: Request) -> None:
        with held(engine):
            submit(request)
            engine._core._closing = True

    monkeypatch.setattr(engine._core, "submit", submit_and_close)
