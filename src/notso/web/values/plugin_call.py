"""Non-blocking plugin calls from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from notso.plugins.process import PluginProcess


async def call_plugin(process: PluginProcess, kind: str, given: Mapping[str, Any], what: str, seconds: float) -> Any:
    """Return a call's result; see `PluginProcess.ask`. Raise PluginError."""
    future = await asyncio.to_thread(process.ask, kind, given, what, seconds)
    return await asyncio.wrap_future(future)
