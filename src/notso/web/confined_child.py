"""Uninterruptible work in a child process with limited CPU time and memory, without files.

A library call blocks its thread, and often the interpreter, until it returns; only a process can be killed. The child's
program imports what it needs, calls `serve_one` and exits after one request.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from notso.system.processes import limit_this_process

NICE = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request."""

    cpu_s: int  # CPU seconds after the child's imports
    memory_bytes: int  # address space
    wall_s: float  # deadline in seconds, then the child is killed
    answer_bytes: int


class ConfinedWorkError(Exception):
    """The child exceeded a limit, failed, or could not be started."""


async def confined(program: str, request: bytes, limits: Limits) -> bytes:
    """Run a request in a child and return its output. Raise ConfinedWorkError.

    `program` is Python source that calls `serve_one` with the same limits. The child is killed at the deadline or on
    cancellation.
    """
    import asyncio  # not at module level: it would dominate the child's startup time

    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            start_new_session=True,  # no signals from the terminal's keyboard
        )
    except OSError as error:
        raise ConfinedWorkError(f"no process can be started: {error.strerror}") from error
    try:
        answer, _ = await asyncio.wait_for(process.communicate(request), limits.wall_s)
    except TimeoutError:
        raise ConfinedWorkError(f"it took more than {limits.wall_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    if process.returncode != 0:
        raise ConfinedWorkError(
            f"it failed, or exceeded {limits.cpu_s} s of CPU time or {limits.memory_bytes >> 20} MiB"
        )
    return answer


def serve_one(work: Callable[[bytes], bytes], limits: Limits) -> None:
    """Answer the request on stdin. The child calls this after its imports."""
    limit_this_process(limits.cpu_s, limits.memory_bytes)
    os.nice(NICE)
    answer = work(sys.stdin.buffer.read())
    if len(answer) > limits.answer_bytes:
        raise SystemExit(1)
    sys.stdout.buffer.write(answer)
