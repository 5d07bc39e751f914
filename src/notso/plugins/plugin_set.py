"""The enabled plugins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from notso.plugins.errors import PluginError
from notso.plugins.loading import installed
from notso.plugins.process import START_SECONDS, PluginProcess

RowFunction = Callable[[memoryview, memoryview], bytes]
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class Plugins:
    """The enabled plugins. Raises PluginError for missing or repeated names."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        known = {each.name for each in installed()} if names else set()
        for name in names:
            if name not in known or not NAME.fullmatch(name):
                there = ", ".join(sorted(known)) or "none"
                raise PluginError(f"no plugin {name!r} is installed; installed: {there}", plugin=name)
            if names.count(name) > 1:
                raise PluginError(f"the plugin {name} is given twice", plugin=name)
        self.processes = tuple(PluginProcess(name) for name in names)

    def start(self) -> None:
        for process in self.processes:
            process.start()

    def wait(self) -> None:
        for process in self.processes:
            process.ready.wait(START_SECONDS)

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def find(self, name: str) -> PluginProcess | None:
        return next((process for process in self.processes if process.name == name), None)

    def given(self, kind: str) -> Iterator[tuple[PluginProcess, dict[str, Any]]]:
        """Yield the rows of a kind with their plugins; the first of a name wins."""
        seen = set()
        for process in self.processes:
            for row in process.offer.get(kind, []) if process.state == "on" else []:
                name = row.get("name")
                if kind == "pages" or name not in seen:
                    seen.add(name)
                    yield process, row

    def logits_processor(self, name: str) -> RowFunction | None:
        for process, row in self.given("logits_processors"):
            if row["name"] == name:
                return lambda tokens, logits: process.change_row(name, tokens, logits)
        return None
