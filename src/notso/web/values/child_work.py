"""Await the work of child processes (sandboxed parsers and plugins) on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from notso.system.confinement import ConfinedProcess, Limits

if TYPE_CHECKING:
    from notso.plugins.process import PluginProcess


class Killable(Protocol):
    """A child process that another thread can end."""

    def kill(self) -> None: ...


C = TypeVar("C", bound=Killable)
T = TypeVar("T")


async def child_work(start: Callable[[], C], work: Callable[[C], T]) -> T:
    """Start a child with `start` and return `work(child)`; both run in threads. Cancellation kills the child."""
    loop = asyncio.get_running_loop()
    starting = loop.run_in_executor(None, start)
    try:
        child = await asyncio.shield(starting)
    except asyncio.CancelledError:
        for started in await asyncio.gather(starting, return_exceptions=True):
            if not isinstance(started, BaseException):
                started.kill()
        raise
    working = loop.run_in_executor(None, work, child)
    try:
        return await asyncio.shield(working)
    finally:
        if not working.done():
            child.kill()
            await asyncio.gather(working, return_exceptions=True)


async def run_confined(program: str, request: bytes, limits: Limits) -> bytes:
    """Send a request to a sandboxed child and return its response. Raises ConfinedWorkError.

    `program` is Python source code, which must call `serve_confined` with the same limits.
    """
    return await child_work(lambda: ConfinedProcess(("-c", program), request, limits), ConfinedProcess.answer)


async def call_plugin(process: PluginProcess, kind: str, params: Mapping[str, Any], what: str, seconds: float) -> Any:
    """Call a plugin (see `PluginProcess.ask`) and return its result. Raises PluginError."""
    future = await asyncio.to_thread(process.ask, kind, params, what, seconds)
    return await asyncio.wrap_future(future)
