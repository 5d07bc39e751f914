"""A store that a plugin gives: every call goes to the plugin's process, and none waits beyond its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from notso.plugins.errors import PluginError
from notso.plugins.process import PluginProcess
from notso.web.store.protocol import ChatStore
from notso.web.store.wire_values import PROPERTIES, types_of, unpacked_error
from notso.web.values.errors import StorageError
from notso.web.values.plugin_call import call_plugin

STORE_SECONDS = 30.0


def plugin_store(process: PluginProcess, directory: Path) -> ChatStore:
    """The conversations as that plugin keeps them. `open` waits until the plugin is loaded."""
    return cast(ChatStore, _PluginStore(process, directory))


class _PluginStore:
    """Has the methods of `ChatStore`, whichever those are. Raises StorageError where the plugin is off."""

    def __init__(self, process: PluginProcess, directory: Path) -> None:
        self._process = process
        self._directory = str(directory)
        self._facts: dict[str, Any] = {"damage": "", "read_only": False, "is_shared": False}
        self._opened = False

    async def open(self) -> None:
        if self._opened:
            return
        await asyncio.to_thread(self._process.start)
        await asyncio.to_thread(self._process.wait)
        if self._process.state == "on" and not self._process.offer.get("stores"):
            raise StorageError(f"the plugin {self._process.name} keeps no conversations")
        await self._asked("open_store", {"directory": self._directory})
        await self._call("open")
        self._opened = True

    async def close(self) -> None:
        if self._opened:
            self._opened = False
            with contextlib.suppress(StorageError):  # it is off, and told so then
                await self._call("close")

    def __getattr__(self, name: str) -> Any:
        if name in PROPERTIES:
            return self._facts[name]
        types_of(name)

        def call(*arguments: Any, **named: Any) -> Coroutine[Any, Any, Any]:
            return self._call(name, *arguments, **named)

        return cast(Callable[..., Any], call)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        types = types_of(method)
        given = {"method": method, "arguments": types.pack(*arguments, **named)}
        answer = await self._asked("store", given)
        if "error" in answer:
            raise unpacked_error(answer["error"])
        self._facts = {name: answer["facts"][name] for name in PROPERTIES}
        return types.unpack_result(answer["result"])

    async def _asked(self, kind: str, given: dict[str, Any]) -> Any:
        try:
            return await call_plugin(self._process, kind, given, "the store", STORE_SECONDS)
        except PluginError as error:
            raise StorageError(str(error)) from None
