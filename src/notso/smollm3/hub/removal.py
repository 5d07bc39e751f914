"""Removal of downloaded model files from the Hugging Face cache."""

from __future__ import annotations

import contextlib

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.hub.registry import LocalModel, known_file, local_models

# How to remove files of other stores.
OWNERS = {
    "ollama": "`ollama rm` removes it",
    "lm studio": "LM Studio removes it",
    "llama.cpp": "delete the file itself",
}


def fetched_model(name: str) -> LocalModel:
    """Return a cached model by name or path. Raises InvalidRequestError."""
    wanted = {name.strip().lower()}
    with contextlib.suppress(InvalidRequestError):
        wanted.add(known_file(name).name.lower())
    found = [model for model in local_models() if model.name.lower() in wanted or str(model.path) == name]
    cached = [model for model in found if model.where == "cache"]
    if len({model.path.resolve() for model in cached}) > 1:
        raise InvalidRequestError(f"several files are named {name}; use the path instead", param="name")
    if cached:
        return cached[0]
    if not found:
        raise InvalidRequestError(f"there is no model {name!r}; `notso list` shows the installed models", param="name")
    if found[0].where == "built in":
        raise InvalidRequestError("the demo model is part of the program", param="name")
    whose = OWNERS.get(found[0].where, "delete the file itself")
    raise InvalidRequestError(f"{name} was not downloaded by `notso pull`: {whose}", param="name")


def remove(model: LocalModel) -> int:
    """Remove the file and its links; return the bytes freed."""
    blob = model.path.resolve()
    repository = model.path.parents[2]
    freed = blob.stat().st_size
    for name in [*repository.glob("snapshots/*/*")]:
        if name.resolve() == blob:
            name.unlink()
            if not any(name.parent.iterdir()):
                name.parent.rmdir()
    # A process that has the file open keeps its bytes until it ends.
    blob.unlink(missing_ok=True)
    return freed
