"""A store in its own process that is killed or whose disk fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
KILLED = """
import asyncio
import os
import signal
import sys
from pathlib import Path
from chaos.stored_turns import a_chat, save_turn
from notso.web.store.sqlite.store import SQLiteStore

async def fill():
    store = SQLiteStore(Path(sys.argv[1]))
    await store.open()
    chat = a_chat()
    for number in range(int(sys.argv[2])):
        await save_turn(store, chat, number)
        print(number, flush=True)

asyncio.run(fill())
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_after(directory: Path, turns: int) -> None:
    """Let this many turns be acknowledged in one chat, then kill the process."""
    assert len(run_program(KILLED, directory, turns, ends=-signal.SIGKILL).split()) == turns


def run_program(program: str, *arguments: object, environment: Mapping[str, str] | None = None, ends: int = 0) -> str:
    """Run a Python program with the tests' import path, require this exit code, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)} | dict(environment or {}),
    )
    assert done.returncode == ends, done.stderr[-3000:]
    return done.stdout
