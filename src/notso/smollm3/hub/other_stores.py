"""SmolLM3 files in the stores of Ollama, LM Studio and llama.cpp.

Read-only. Files are identified by their first bytes, not by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from notso.system.files import cache_folder
from notso.text_file import open_regular, read_regular

Store = Literal["ollama", "lm studio", "llama.cpp"]

MAX_MANIFESTS = 2_000
MAX_MANIFEST_BYTES = 1 << 20
# The architecture is near the beginning of the metadata; no known converter writes it after the vocabulary.
HEAD_BYTES = 64 << 10

_ARCHITECTURE = b"general.architecture" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"smollm3"
_ADAPTER = b"general.type" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"adapter"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_REGISTRY, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A file, and its name in the store."""

    name: str
    path: Path
    store: Store


def is_smollm3(path: Path) -> bool:
    """Return whether a file starts as a SmolLM3 GGUF, not an adapter."""
    try:
        with open(open_regular(path), "rb") as file:  # noqa: PTH123 - a descriptor
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(b"GGUF") and _ARCHITECTURE in head and _ADAPTER not in head


def stored_models() -> list[StoredModel]:
    """Return each SmolLM3 file once."""
    found: dict[Path, StoredModel] = {}
    for model in (*_of_ollama(), *_of_folders()):
        if is_smollm3(model.path):
            found.setdefault(model.path.resolve(), model)
    return list(found.values())


def _of_ollama() -> Iterator[StoredModel]:
    asked = os.environ.get("OLLAMA_MODELS")
    # Ollama stores files by hash, and names in manifests: registry/namespace/model/tag.
    roots = [Path(asked)] if asked else [_home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
    for root in roots:
        for number, manifest in enumerate(_files(root / "manifests", "*/*/*/*")):
            if number == MAX_MANIFESTS:
                break
            blob = _ollama_blob(root, manifest)
            if blob is not None:
                registry, namespace, model, tag = manifest.parts[-4:]
                place = [registry] * (registry != _OLLAMA_REGISTRY) + [namespace] * (namespace != _OLLAMA_NAMESPACE)
                yield StoredModel(f"{'/'.join([*place, model])}:{tag}", blob, "ollama")


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    try:
        layers = json.loads(read_regular(manifest, MAX_MANIFEST_BYTES))["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    kind, _, digest = str(digests[0]).partition(":") if len(digests) == 1 else ("", "", "")
    return root / "blobs" / f"sha256-{digest}" if kind == "sha256" and digest.isalnum() else None


def _of_folders() -> Iterator[StoredModel]:
    # LM Studio: publisher/repository/file. llama.cpp: a single folder.
    home = _home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    for root in (home / ".lmstudio/models", cache / "lm-studio/models"):
        for path in _files(root, "*/*/*.gguf"):
            yield StoredModel(f"{path.parent.parent.name}/{path.parent.name}/{path.stem}", path, "lm studio")
    for path in _files(Path(os.environ.get("LLAMA_CACHE") or cache_folder(home) / "llama.cpp"), "*.gguf"):
        yield StoredModel(path.stem, path, "llama.cpp")


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")  # e.g. a service that runs under a numeric id without an account


def _files(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in root.glob(pattern) if path.is_file())
    except OSError:
        return []
