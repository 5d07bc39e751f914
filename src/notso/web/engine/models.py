"""List the model files on this machine, which clients select by key instead of path, and the operator's adapters."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from notso.smollm3 import (
    DownloadPlan,
    KnownFile,
    LocalModel,
    ModelInfo,
    is_offline,
    local_models,
    official_files,
    plan_download,
)
from notso.text_file import is_unicode
from notso.web.engine.port import ChatEngine

PEFT_CONFIG = "adapter_config.json"
MAX_LISTED = 500
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    path: str  # GGUF file or PEFT folder, relative to the operator's folder
    name: str


def adapter_files(folder: Path | None) -> list[AdapterFile]:
    """List the adapters at the top level of a folder, or none if it is unreadable. Blocks."""
    if folder is None:
        return []
    try:
        found = sorted(
            path
            for path in folder.iterdir()
            if is_unicode(path)
            and (
                # Path.is_file would raise an error for a path that cannot be accessed.
                (path.suffix == ".gguf" and os.path.isfile(path)) or os.path.isfile(path / PEFT_CONFIG)  # noqa: PTH113
            )
        )
    except OSError:
        return []
    return [AdapterFile(path.name, adapter_name(path)) for path in found[:MAX_LISTED]]


def adapter_name(path: Path) -> str:
    """Return the name by which requests select the adapter at `path`."""
    stem = path.stem if path.suffix == ".gguf" else path.name
    return _NO_NAME.sub("-", stem).strip("._-")[:64] or "adapter"


def resolve_within(folder: Path, name: str) -> Path | None:
    """Resolve a path in `folder`. Return None if it is invalid or leads outside `folder`, even through links."""
    try:
        root, path = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError):
        return None
    return path if path.is_relative_to(root) else None


ModelLoader = Callable[[Path | None], ChatEngine]
"""Function that loads a model file or, for None, the demo model. Blocks. Raises NotsoError."""

BesideLoader = Callable[[Path | None, int], ChatEngine]
"""Like ModelLoader, but loads the model while other engines stay loaded. The second argument is their planned memory in
bytes. Raises OutOfMemoryError if too little memory remains."""

FileCheck = Callable[[Path | None], None]
"""Function that checks the header of a model file. Raises NotsoError if the model cannot run."""


@dataclass(frozen=True, slots=True)
class ModelRegistry:
    load: ModelLoader
    folder: Path | None = None  # folder of the initial model; None if no model was specified
    load_beside: BesideLoader | None = None  # None: only one model can be loaded at a time
    check: FileCheck | None = None  # rejects unusable files before other models are unloaded to make room


@dataclass(frozen=True, slots=True)
class InstalledModel:
    key: str  # used in forms instead of the path, so that clients cannot choose arbitrary paths
    model: LocalModel
    in_use: bool

    @property
    def path(self) -> Path | None:
        """Path to load, or None for the demo model."""
        return None if self.model.where == "built in" else self.model.path


@dataclass(frozen=True, slots=True)
class DownloadableModel:
    file: KnownFile
    plan: DownloadPlan


@dataclass(frozen=True, slots=True)
class Inventory:
    installed: tuple[InstalledModel, ...]
    offered: tuple[DownloadableModel, ...]
    offline: bool

    def find(self, key: str) -> InstalledModel | None:
        return next((each for each in self.installed if each.key == key), None)

    def search(self, name: str) -> list[InstalledModel]:
        """Return the models with this name or, if there are none, those with a name or key that contains it."""
        query = name.casefold().strip()
        found = [each for each in self.installed if query and query in f"{each.key} {each.model.name}".casefold()]
        return [each for each in found if each.model.name.casefold() == query] or found


def scan_models(info: ModelInfo | None, folder: Path | None) -> Inventory:
    models: dict[Path, LocalModel] = {}
    for model in local_models([folder] if folder else []):
        if is_unicode(model.path):  # a path that is not Unicode cannot appear in a page or response
            models.setdefault(model.path.resolve(), model)  # links in several folders may lead to the same file
    in_use = Path(info.path).resolve() if info is not None and info.path else None
    installed = tuple(InstalledModel(_key(model), model, path == in_use) for path, model in models.items())
    cached_names = {each.model.name for each in installed if each.model.where == "cache"}
    missing = [file for file in official_files() if file.name not in cached_names]
    return Inventory(installed, tuple(DownloadableModel(file, plan_download(file)) for file in missing), is_offline())


def _key(model: LocalModel) -> str:
    if model.where == "built in":
        return "demo"
    if model.where == "cache" and model.name in {file.name for file in official_files()}:
        return model.name
    return hashlib.sha256(str(model.path).encode("utf-8", "surrogateescape")).hexdigest()[:16]
