"""A store in a plugin's process: `Plugin(store=served(MyStore))`, where MyStore(directory) is a ChatStore."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from notso.web.store.protocol import ChatStore
from notso.web.store.wire_values import PROPERTIES, packed_error, types_of
from notso.web.values.errors import StorageError


def served(make: Callable[[Path], ChatStore]) -> Callable[[Path], ServedStore]:
    """What a plugin gives as `store`."""
    return lambda directory: ServedStore(make(directory))


class ServedStore:
    """Runs the store on an event loop of its own, for the plugin's process has none."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="notso-store", daemon=True).start()

    def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A call as JSON, and what came of it."""
        try:
            types = types_of(method)
            result = self._awaited(getattr(self._store, method)(**types.unpack(arguments)))
            facts = {name: getattr(self._store, name) for name in PROPERTIES}
            return {"result": types.pack_result(result), "facts": facts}
        except StorageError as error:
            return {"error": packed_error(error)}

    def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
