"""Run a plugin: load it, send its offer (a description of what it provides), and answer calls concurrently.

The server starts this program as `python -m notso.plugins.child NAME SOCKET MEMORY`, where SOCKET and MEMORY are
the numbers of inherited file descriptors. The server logs the plugin's output. The process exits when the server closes
the socket.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from notso.plugins import loading, wire
from notso.plugins.offers import is_valid_result
from notso.plugins.values import CalledIn, PageRequest, PageResponse, Plugin, Refused, SignInRequest
from notso.system.confinement import Rights, confine

CALLS_AT_ONCE = 8


class PluginWorker:
    """Answers each packet with a packet that has the same `id`."""

    def __init__(self, plugin: Plugin, connection: socket.socket, memory: int) -> None:
        self._plugin = plugin
        self._connection = connection
        self._memory = mmap.mmap(memory, wire.SHARED_BYTES)
        self._writing = threading.Lock()
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE)
        self._rows = {each.name: each for each in plugin.logits_processors}
        if self._rows:
            import numpy  # noqa: F401  # now, because this import may take longer than the timeout of a call
        self._kinds: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
            "tool": self._tool,
            "logits": self._logits,
            "command": self._command,
            "page": self._page,
            "sign_in": self._sign_in,
        }

    def serve(self) -> None:
        unpacker = wire.Unpacker()
        while (packets := wire.receive(self._connection, unpacker)) is not None:
            for packet in packets:
                self._pool.submit(self._answer, packet)

    def _answer(self, packet: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"id": packet["id"]}
        try:
            answer["result"] = self._kinds[packet["kind"]](packet["given"])
            if not is_valid_result(packet["kind"], answer["result"]):
                raise TypeError("invalid result, or more than 1 MiB of text")
            data = wire.encode_packet(answer, wire.MAX_ANSWER_BYTES)
        except Refused as error:
            data = wire.encode_packet({"id": packet["id"], "refused": str(error)})
        except BaseException as error:
            data = wire.encode_packet({"id": packet["id"], "failed": f"{type(error).__name__}: {error}"})
        with self._writing:
            self._connection.sendall(data)

    def _tool(self, arguments: Mapping[str, Any]) -> str:
        tool = next(each for each in self._plugin.tools if each.name == arguments["name"])
        return str(tool.run(arguments["arguments"], CalledIn(**arguments["called_in"])))

    def _logits(self, arguments: Mapping[str, Any]) -> int:
        import numpy as np

        tokens = np.frombuffer(self._memory, np.int32, arguments["tokens"], wire.ROW_BYTES).copy()
        row = np.frombuffer(self._memory, np.float32, arguments["vocab"])
        result = np.asarray(self._rows[arguments["name"]].process(tokens, row.copy()), np.float32)
        if result.shape != row.shape:
            raise ValueError(f"the logits must have shape {row.shape}, not {result.shape}")
        row[:] = result
        return int(result.size)

    def _command(self, arguments: Mapping[str, Any]) -> str:
        command = next(each for each in self._plugin.slash_commands if each.name == arguments["name"])
        return str(command.run(arguments["argument"]))

    def _page(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        page = next(each for each in self._plugin.pages if each.path == arguments["path"])
        result = page.show(PageRequest(**arguments))
        response = PageResponse(result) if isinstance(result, str) else result
        return {"body": response.body, "media_type": response.media_type, "status": response.status}

    def _sign_in(self, arguments: Mapping[str, Any]) -> str | None:
        return self._plugin.sign_in(SignInRequest(**arguments)) if self._plugin.sign_in is not None else None


def _as_dict(schema: Any) -> Any:
    return dict(schema) if isinstance(schema, Mapping) else schema  # the server rejects schemas that are not objects


def build_offer(plugin: Plugin) -> dict[str, Any]:
    return {
        "tools": [
            {"name": t.name, "description": t.description, "parameters": _as_dict(t.parameters), "seconds": t.seconds}
            for t in plugin.tools
        ],
        "logits_processors": [{"name": each.name, "does": each.does} for each in plugin.logits_processors],
        "slash_commands": [{"name": c.name, "usage": c.usage, "does": c.does} for c in plugin.slash_commands],
        "pages": [{"path": each.path, "title": each.title} for each in plugin.pages],
        "signs_in": plugin.sign_in is not None,
    }


def main(name: str, connection: socket.socket, memory: int) -> None:
    try:
        plugin = loading.load(name)
        child = PluginWorker(plugin, connection, memory)
        offer_packet = wire.encode_packet({"offer": build_offer(plugin)}, wire.MAX_ANSWER_BYTES)
    except BaseException as error:
        connection.sendall(wire.encode_packet({"unloadable": f"{type(error).__name__}: {error}"}))
        return
    connection.sendall(offer_packet)
    child.serve()


if __name__ == "__main__":
    confine(Rights.FILES_AND_NETWORK)
    try:
        main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    finally:
        os._exit(0)  # a normal exit would wait for the plugin's threads
