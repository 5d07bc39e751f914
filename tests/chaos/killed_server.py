"""A server with the demo model that kills itself in the middle of an answer.

The processes are forked by multiprocessing's fork server, which has imported the program already, because most of the
startup time is imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["notso.smollm3", "notso.web.server", "notso.web.app", "psycopg"])


def serve_until(
    place: str, ready: Connection, folder: Path, pace_s: float, database: str | None, valkey: str | None
) -> None:
    """Serve and kill the process at `place`: a number of answer tokens, "tool", or "" for never."""
    from notso.smollm3 import Engine
    from notso.web.chat import submit
    from notso.web.server import serve
    from notso.web.tools.calculator import CALCULATOR
    from notso.web.turns import tool_calls
    from notso.web.turns.turn_consumer import TurnConsumer
    from notso.web.values.settings import Settings

    taken, run_tool = TurnConsumer.consume, tool_calls.run_tool

    def take(self: Any, events: Any) -> None:
        runs = self._recorder.trace.runs if self._recorder is not None else ()
        before = sum(len(run.ids) for run in runs)
        if not hasattr(self, "begun_with"):
            self.begun_with = before
        taken(self, events)
        runs = self._recorder.trace.runs if self._recorder is not None else ()
        tokens = sum(len(run.ids) for run in runs)
        # The server gives up an answer that kills two processes within its next token, so let each generate two tokens.
        if place.isdecimal() and tokens >= max(int(place), self.begun_with + 2):
            os.kill(os.getpid(), signal.SIGKILL)

    async def run(*arguments: Any) -> Any:
        result = await run_tool(*arguments)
        if place == "tool":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def load() -> Engine:
        engine = Engine.load(None, threads=1)
        step = engine._core._step

        def paced() -> None:
            time.sleep(pace_s)
            step()

        if pace_s:
            engine._core._step = paced  # type: ignore[method-assign]
        return engine

    TurnConsumer.consume = take  # type: ignore[method-assign]
    tool_calls.run_tool = run
    submit.allowed_digests = lambda chat: {CALCULATOR.digest}  # type: ignore[assignment]
    settings = Settings(port=0, data_dir=folder, database_url=database, valkey_url=valkey)
    serve(load, settings, on_ready=ready.send)
