"""Work that cannot be interrupted, in a process of its own that may use so much CPU time and memory and no files.

A call into a library holds its thread, and often the interpreter, until it returns; only a process can be ended. The
child's program imports what it needs, calls `serve_one`, and ends: it answers one request.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

NICE = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost: CPU seconds beyond the child's start, bytes of address space, seconds until it is
    killed, bytes of its answer."""

    cpu_s: int
    memory_bytes: int
    wall_s: float
    answer_bytes: int


class ConfinedWorkError(Exception):
    """The child went over a limit, failed, or could not be started."""


async def confined(program: str, request: bytes, limits: Limits) -> bytes:
    """Return what a child makes of a request. It is killed at the deadline, and when this is cancelled.

    program: Python source that calls `serve_one` with the same limits. Raises ConfinedWorkError.
    """
    import asyncio  # not in the child: it would be most of its start

    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            start_new_session=True,  # a key pressed in the terminal is not for it
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
            f"it failed, or went over {limits.cpu_s} s of CPU time or {limits.memory_bytes >> 20} MiB"
        )
    return answer


def serve_one(work: Callable[[bytes], bytes], limits: Limits) -> None:
    """Answer the request on stdin, within limits. To be called by the child's program, when all is imported."""
    _limit_this_process(limits)
    answer = work(sys.stdin.buffer.read())
    if len(answer) > limits.answer_bytes:
        raise SystemExit(1)
    sys.stdout.buffer.write(answer)


def _limit_this_process(limits: Limits) -> None:
    import resource

    spent = int(sum(os.times()[:2]))
    most = {
        resource.RLIMIT_CPU: spent + limits.cpu_s,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in most.items():
        resource.setrlimit(which, (limit, limit))
    os.nice(NICE)
