"""What the loaded model is called in the API."""

from __future__ import annotations

from pathlib import Path

from notso.smollm3 import ModelInfo, official_files
from notso.web.api.shared.completion import model_id
from notso.web.edge.api_error import ApiError


def names_of(info: ModelInfo) -> frozenset[str]:
    """Every name a request may call the loaded model by, in lower case."""
    path = Path(info.path)
    official = {file.name for file in official_files() if file.filename == path.name}
    names = {model_id(info), info.name, path.stem, *official, *(name.partition(":")[0] for name in official)}
    return frozenset(name.lower() for name in names if name)


def require_model(wanted: str | None, info: ModelInfo) -> None:
    """Raises ApiError (404) if a request names a model that is not the one loaded."""
    if wanted is not None and wanted.lower() not in names_of(info):
        raise ApiError(404, "model_not_found", f"that model is not loaded here; {model_id(info)} is", param="model")
