"""The plugins that were switched on: what each gives, and how it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from notso.plugins.errors import PluginError
from notso.plugins.loading import installed
from notso.plugins.process import PluginProcess

RowFunction = Callable[[memoryview, memoryview], bytes]
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Plugins:
    """Raises PluginError for a name that is not installed, or named twice."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        known = {each.name for each in installed()} if names else set()
        for name in names:
            if name not in known or not NAME.fullmatch(name):
                there = ", ".join(sorted(known)) or "none"
                raise PluginError(f"no plugin {name!r} is installed; there are: {there}", plugin=name)
            if names.count(name) > 1:
                raise PluginError(f"the plugin {name} is named twice", plugin=name)
        self.processes = tuple(PluginProcess(name) for name in names)

    def start(self) -> None:
        """Start all; nobody waits for that."""
        for process in self.processes:
            process.start()

    def wait(self) -> None:
        """Until each is on or off."""
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """End all."""
        for process in self.processes:
            process.close()

    def find(self, name: str) -> PluginProcess | None:
        """The plugin of that name."""
        return next((process for process in self.processes if process.name == name), None)

    def given(self, kind: str) -> Iterator[tuple[PluginProcess, dict[str, Any]]]:
        """What the plugins that are on give of a kind ("tools", "pages"), each with its plugin, the first of a name."""
        seen = set()
        for process in self.processes:
            for row in process.offer.get(kind, []) if process.state == "on" else []:
                name = row.get("name")
                if kind == "pages" or name not in seen:
                    seen.add(name)
                    yield process, row

    def logits_processor(self, name: str) -> RowFunction | None:
        """The one of that name, as the engine calls it: tokens, int32, and logits, float32, as bytes, to logits."""
        for process, row in self.given("logits_processors"):
            if row["name"] == name:
                return lambda tokens, logits: process.change_row(name, tokens, logits)
        return None
