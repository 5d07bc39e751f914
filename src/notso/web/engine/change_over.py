"""Automatic switch from the demo to a downloaded model once that is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from notso.smollm3 import KnownFile
from notso.web.engine.host import EngineHost
from notso.web.engine.model_names import served_file
from notso.web.engine.models import Installed, ModelRegistry, take_inventory
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.engine")

# The download's end waits this long for a busy loop, so that it is not shown as done before its model is loading.
PATIENCE_SECONDS = 10.0


def change_over(host: EngineHost, registry: ModelRegistry | None, file: KnownFile) -> Callable[[], None]:
    """Return a thread-safe callback for the arrival of `file`. Call on the event loop.

    A default chosen by the user stays, as does the demo if the file cannot be loaded.
    """
    loop = asyncio.get_running_loop()

    async def begin(chosen: Installed) -> None:
        if registry is not None:
            host.switch_when_loaded(served_file(host, registry, chosen))

    def arrived() -> None:
        chosen = _successor(host, registry, file)
        if chosen is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # the server is shutting down
                asyncio.run_coroutine_threadsafe(begin(chosen), loop).result(PATIENCE_SECONDS)

    return arrived


def _successor(host: EngineHost, registry: ModelRegistry | None, file: KnownFile) -> Installed | None:
    if registry is None:
        return None
    inventory = take_inventory(host.default.info, registry.folder)
    chosen = inventory.find(file.name)
    if chosen is None or not any(each.in_use and each.path is None for each in inventory.installed):
        return None
    try:
        if registry.check is not None:
            registry.check(chosen.path)
    except (NotsoError, OSError) as error:
        logger.warning("still using the demo model: %s", error)
        return None
    return chosen
