"""The model files on this machine, as the page lists them: named by what cannot be guessed into a path."""

from __future__ import annotations

import hashlib
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
from notso.web.engine.port import ChatEngine

ModelLoader = Callable[[Path | None], ChatEngine]
"""Loads a model file, or the demo for None. May take its time, and raise ModelError."""

BesideLoader = Callable[[Path | None, int], ChatEngine]
"""The same beside engines that were planned to occupy so many bytes. Raises OutOfMemoryError where it would not fit
as it would alone."""

FileCheck = Callable[[Path | None], None]
"""Looks at a file's headers. Raises NotsoError where it is no model that can be run."""


@dataclass(frozen=True, slots=True)
class ModelRegistry:
    """How another model can be taken: who loads it, and the folder in which the first one lay, if it was named. Without
    `load_beside` there is one at a time; `check` refuses a file before anything is closed for it."""

    load: ModelLoader
    folder: Path | None = None
    load_beside: BesideLoader | None = None
    check: FileCheck | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """A file that can be switched to. `key` stands for it in forms: no path comes from a client."""

    key: str
    model: LocalModel
    in_use: bool

    @property
    def path(self) -> Path | None:
        """What to load; None is the demo."""
        return None if self.model.where == "built in" else self.model.path


@dataclass(frozen=True, slots=True)
class Offered:
    """An official file that is not here, and what it would take."""

    file: KnownFile
    plan: DownloadPlan


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the page lists."""

    installed: tuple[Installed, ...]
    offered: tuple[Offered, ...]
    offline: bool

    def find(self, key: str) -> Installed | None:
        """The model a form means."""
        return next((each for each in self.installed if each.key == key), None)

    def like(self, name: str) -> list[Installed]:
        """The models a person may mean by a name or a part of one."""
        wanted = name.casefold().strip()
        found = [each for each in self.installed if wanted and wanted in f"{each.key} {each.model.name}".casefold()]
        return [each for each in found if each.model.name.casefold() == wanted] or found


def take_inventory(info: ModelInfo | None, folder: Path | None) -> Inventory:
    """Look through the disk: the demo, the cache, and `folder`, where the model lay that the server began with."""
    models: dict[Path, LocalModel] = {}
    for model in local_models([folder] if folder else []):
        models.setdefault(model.path.resolve(), model)  # one file may be found twice
    in_use = Path(info.path).resolve() if info is not None and info.path else None
    installed = tuple(Installed(_key(model), model, path == in_use) for path, model in models.items())
    here = {each.model.name for each in installed if each.model.where == "cache"}
    missing = [file for file in official_files() if file.name not in here]
    return Inventory(installed, tuple(Offered(file, plan_download(file)) for file in missing), is_offline())


def _key(model: LocalModel) -> str:
    if model.where == "built in":
        return "demo"
    if model.where == "cache" and model.name in {file.name for file in official_files()}:
        return model.name
    return hashlib.sha256(str(model.path).encode("utf-8", "surrogateescape")).hexdigest()[:16]
