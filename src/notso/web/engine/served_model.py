"""One model that can answer here: how it is loaded, whether it is, and who uses it."""

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
"""Loads an engine beside others, which were planned to occupy so many bytes. May raise ModelError: OutOfMemoryError
where it would not fit as it would alone."""


@dataclass(eq=False, slots=True)
class ServedModel:
    """On the event loop, but for `state`, `info`, `failure` and `engine`, which may be read anywhere.

    `key` stands for it in requests, `name` is what it is listed as ('' where it has the file's own name only). `info`
    and `adapters` outlive the engine: it is unloaded, and comes back with what it had. `loads` counts how often it was
    loaded, `users` are requests that hold it so; while it is `leaving`, it takes no more of them. `keep_alive_s` is how
    long the last request wanted it to stay without any, negative: for ever; None leaves that to the server.
    """

    key: str
    load: EngineSource
    load_beside: BesideSource | None = None
    name: str = ""
    path: Path | None = None
    state: EngineState = "unloaded"
    info: ModelInfo | None = None
    failure: str = ""
    engine: ChatEngine | None = None
    adapters: tuple[AdapterSource, ...] | None = None
    loads: int = 0
    users: int = 0
    leaving: bool = False
    idle_since: float = 0.0
    keep_alive_s: float | None = None
    expires: asyncio.TimerHandle | None = None

    @property
    def planned_bytes(self) -> int:
        """What it was planned to occupy when it was loaded."""
        if self.info is None:
            return 0
        return self.info.memory.needed_bytes if self.info.memory is not None else self.info.size_bytes

    @property
    def takes_requests(self) -> bool:
        """Whether a request could begin at once."""
        return self.engine is not None and not self.leaving

    def opened(self, engine: ChatEngine) -> None:
        """It is loaded."""
        self.loads += 1
        self.engine, self.info, self.failure, self.state = engine, engine.info, "", "ready"
        if self.info is not None and self.info.path:
            self.path = Path(self.info.path).resolve()

    def with_adapters(self, load: EngineSource) -> ChatEngine:
        """Load it, with the adapters that it had when it was unloaded, and no others. One whose file has gone is left
        out. Raises what `load` raises. In a thread."""
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
            except NotsoError as error:
                logger.warning("adapter %s is not as it was before: %s", name, error)
        return engine

    def forget_adapter(self, name: str) -> None:
        """It does not come back with the model."""
        if self.adapters is not None:
            self.adapters = tuple(source for source in self.adapters if source.name != name)

    def closed(self) -> ChatEngine | None:
        """It is not loaded any more: the engine that is to be closed, whose adapters are remembered."""
        engine, self.engine = self.engine, None
        self.state, self.leaving = "unloaded", False
        if engine is not None:
            self.adapters = tuple(AdapterSource(i.name, i.path, i.scale) for i in engine.adapters.infos.values())
        return engine
