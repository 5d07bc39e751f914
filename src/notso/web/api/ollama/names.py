"""What Ollama's clients call a model: `name` means `name:latest`, and a size is a tag."""

from __future__ import annotations

from notso.smollm3 import ModelInfo
from notso.web.engine.model_names import LATEST, model_id, names_of

LIBRARY_NAMES = {"smollm3": "smollm3-3b", "smollm3:3b": "smollm3-3b"}
"""As a library of models would list it -> as our other APIs have it."""


def plain_name(name: str | None, info: ModelInfo | None) -> str | None:
    """The name our other APIs know, where the given one is a spelling of it; else as given."""
    if name is None:
        return None
    short = name.lower().removesuffix(LATEST)
    known = LIBRARY_NAMES.get(short, short)
    return known if info is not None and known in names_of(info) else name


def listed_name(info: ModelInfo) -> str:
    """As lists of models tell it, with a tag."""
    return tagged(model_id(info))


def tagged(name: str) -> str:
    """With a tag, if it has none."""
    return name if ":" in name else name + LATEST
