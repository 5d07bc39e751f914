"""Load and remove LoRA adapters while an engine runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from notso.qtensor import Backend, available_memory
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.engine_core import EngineCore
from notso.smollm3.errors import InvalidRequestError, OutOfMemoryError
from notso.smollm3.model.lora import Adapter, read_adapter
from notso.smollm3.values.engine_config import AdapterInfo, AdapterSource

MAX_ADAPTERS = 64


class Adapters:
    """Loaded adapters. `add` and `remove` wait for the engine thread and must not be called on it."""

    def __init__(self, config: SmolLM3Config, core: EngineCore, backend: Backend) -> None:
        self._config = config
        self._core = core
        self._backend = backend
        self._change_lock = threading.Lock()
        self._loaded: dict[str, tuple[Adapter, AdapterInfo]] = {}

    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        return {name: info for name, (_, info) in sorted(self._loaded.items())}

    def of(self, name: str | None) -> Adapter | None:
        """Return an adapter by name. Raises InvalidRequestError if it is not loaded."""
        if name is None:
            return None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidRequestError("the adapter is not loaded", param="adapter")
        return found[0]

    def add(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter. Raises InvalidRequestError, ModelFileError, OutOfMemoryError or EngineError."""
        with self._change_lock:
            if source.name.lower() in {name.lower() for name in self._loaded}:
                raise InvalidRequestError(f"adapter {source.name} is already loaded", param="adapter")
            if len(self._loaded) >= MAX_ADAPTERS:
                raise InvalidRequestError(f"at most {MAX_ADAPTERS} adapters can be loaded", param="adapter")
            available_bytes = available_memory().available_bytes
            parsed = read_adapter(source.name, Path(source.path), self._config, source.scale, available_bytes)
            limit = self._backend.memory()
            if parsed.nbytes > limit.available_bytes:
                raise OutOfMemoryError(
                    f"adapter {source.name} needs {parsed.nbytes:,} bytes, but {limit.source} leaves "
                    f"{limit.available_bytes:,}",
                    needed_bytes=parsed.nbytes,
                    available_bytes=limit.available_bytes,
                )

            def load_on_device() -> Adapter:
                adapter = parsed.to_device(self._backend)
                self._core.runner.add_adapter(adapter)
                return adapter

            adapter = self._core.call(load_on_device)
            count = sum(map(len, parsed.layers))
            info = AdapterInfo(
                source.name, source.path, source.scale, parsed.rank, parsed.nbytes, count, parsed.digest.hex()
            )
            self._loaded[source.name] = adapter, info
            return info

    def remove(self, name: str) -> None:
        """Remove an adapter; running requests keep using it. Raises InvalidRequestError or EngineError."""
        with self._change_lock:
            adapter = self.of(name)
            if adapter is None:
                raise InvalidRequestError("the adapter is not loaded", param="adapter")
            del self._loaded[name]
            self._core.call(lambda: self._core.runner.remove_adapter(adapter))
