"""State of one model that can be loaded to answer requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from notso.web.engine.port import AdapterSource, ChatEngine, EngineSource, ModelInfo
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.engine")

EngineState = Literal["unloaded", "loading", "ready", "failed", "stopped"]

BesideSource = Callable[[int], ChatEngine]
"""Loads beside engines planned to occupy this many bytes. Raises ModelError; OutOfMemoryError if it would not fit as it
would alone."""


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model and its loading state.

    `state`, `info`, `failure` and `engine` may be read in any thread; use the rest on the event loop.
    """

    key: str  # identifies the model in requests
    load: EngineSource
    load_beside: BesideSource | None = None
    name: str = ""  # as listed; '' if it only has the file's own name
    path: Path | None = None
    state: EngineState = "unloaded"
    info: ModelInfo | None = None  # kept while unloaded
    failure: str = ""
    engine: ChatEngine | None = None
    adapters: tuple[AdapterSource, ...] | None = None  # restored after unloading
    loads: int = 0  # number of loads so far
    users: int = 0  # requests that hold it loaded
    leaving: bool = False  # takes no more requests
    idle_since: float = 0.0
    keep_alive_s: float | None = None  # from the last request, negative: unlimited; None: server's default
    expires: asyncio.TimerHandle | None = None

    @property
    def planned_bytes(self) -> int:
        """Memory planned at loading."""
        if self.info is None:
            return 0
        return self.info.memory.needed_bytes if self.info.memory is not None else self.info.size_bytes

    @property
    def takes_requests(self) -> bool:
        return self.engine is not None and not self.leaving

    def opened(self, engine: ChatEngine) -> None:
        self.loads += 1
        self.engine, self.info, self.failure, self.state = engine, engine.info, "", "ready"
        if self.info is not None and self.info.path:
            self.path = Path(self.info.path).resolve()

    def with_adapters(self, load: EngineSource) -> ChatEngine:
        """Load the engine and restore its adapters. Blocks. Raises like `load`."""
        engine = load()
        if self.adapters is None:
            return engine
        wanted, there = {source.name: source for source in self.adapters}, set(engine.adapters.infos)
        for name in wanted.keys() ^ there:
            try:
                if name in there:
                    engine.adapters.remove(name)
                else:
                    engine.adapters.add(wanted[name])
            # An adapter file that is gone is skipped.
            except NotsoError as error:
                logger.warning("adapter %s was not loaded again: %s", name, error)
        return engine

    def forget_adapter(self, name: str) -> None:
        """Do not restore this adapter."""
        if self.adapters is not None:
            self.adapters = tuple(source for source in self.adapters if source.name != name)

    def closed(self) -> ChatEngine | None:
        """Mark as unloaded; return the engine to close."""
        engine, self.engine = self.engine, None
        self.state, self.leaving = "unloaded", False
        if engine is not None:
            self.adapters = tuple(AdapterSource(i.name, i.path, i.scale) for i in engine.adapters.infos.values())
        return engine
