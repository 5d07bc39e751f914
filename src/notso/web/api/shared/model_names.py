"""What the loaded model is called in the API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from notso.smollm3 import ModelInfo, official_files
from notso.web.api.shared.completion import model_id
from notso.web.edge.api_error import ApiError

FAMILY = "smollm3"
"""Whatever the loaded file is called, this names it where an adapter follows."""


def names_of(info: ModelInfo) -> frozenset[str]:
    """Every name a request may call the loaded model by, in lower case."""
    path = Path(info.path)
    official = {file.name for file in official_files() if file.filename == path.name}
    names = {model_id(info), info.name, path.stem, *official, *(name.partition(":")[0] for name in official)}
    return frozenset(name.lower() for name in names if name)


def require_model(wanted: str | None, info: ModelInfo, adapters: Iterable[str] = ()) -> str | None:
    """The adapter that a request names by its model: NAME, or MODEL:NAME; None for the model itself.

    Raises ApiError (404) if a request names a model that is not the one loaded.
    """
    known = names_of(info)
    if wanted is None or wanted.lower() in known:
        return None
    base, colon, name = wanted.lower().removesuffix(":latest").rpartition(":")  # a tag, to Ollama's clients
    if not colon or base == FAMILY or base in known:
        for adapter in adapters:
            if adapter.lower() == name:
                return adapter
    loaded = ", ".join([model_id(info), *(adapter_id(info, adapter) for adapter in adapters)])
    raise ApiError(404, "model_not_found", f"that model is not loaded here; loaded: {loaded}", param="model")


def adapter_id(info: ModelInfo, adapter: str) -> str:
    """What the model with an adapter is called in the API."""
    return f"{model_id(info)}:{adapter.lower()}"


def with_adapter(info: ModelInfo, adapter: str | None) -> ModelInfo:
    """What answers, by that name."""
    return info if adapter is None else replace(info, name=f"{info.name}:{adapter}")
