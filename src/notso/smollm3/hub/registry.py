"""Registry of official model files, and of model files on this machine. It does not use the network.

Files in the Hugging Face cache are used in place, so they are shared with other programs. The model folders of Ollama,
LM Studio and llama.cpp, called stores here, are searched but never modified. Models in stores are recognized by their
first bytes, because Ollama names files by hash.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import platformdirs

from notso.smollm3.errors import InvalidRequestError, ModelFileError
from notso.smollm3.strict_json import json_or_none
from notso.smollm3.values.engine_config import expand_home
from notso.system.files import cache_folder, file_type
from notso.text_file import open_regular, read_regular

Store = Literal["ollama", "lm studio", "llama.cpp"]

MAX_MANIFESTS = 2_000
MAX_MANIFEST_BYTES = 1 << 20
# Number of leading bytes that are searched for the architecture. All known converters write it near the beginning of
# the metadata, before the large vocabulary.
HEAD_BYTES = 64 << 10

_ARCHITECTURE = b"general.architecture" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"smollm3"
_ADAPTER = b"general.type" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"adapter"
_OLLAMA_MODEL, _OLLAMA_ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))
_OLLAMA_REGISTRY, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model file in a store, with its name there."""

    name: str
    path: Path
    store: Store


def is_smollm3(path: Path) -> bool:
    """Return whether a file is a SmolLM3 GGUF model, based on its first HEAD_BYTES."""
    try:
        with open(open_regular(path), "rb") as file:  # noqa: PTH123 - a descriptor
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(b"GGUF") and _ARCHITECTURE in head and _ADAPTER not in head


def stored_models() -> list[StoredModel]:
    """Return the SmolLM3 files in stores, without duplicates."""
    found: dict[Path, StoredModel] = {}
    for model in (*_ollama_models(), *_folder_models()):
        if is_smollm3(model.path):
            found.setdefault(model.path.resolve(), model)
    return list(found.values())


def _ollama_models() -> Iterator[StoredModel]:
    configured = os.environ.get("OLLAMA_MODELS")
    # Ollama stores manifests as registry/namespace/model/tag.
    roots = [Path(configured)] if configured else [_home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
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
        # A model with an adapter is skipped, because without the adapter, its answers would be wrong.
        digests = [each["digest"] for each in layers if each["mediaType"] in (_OLLAMA_MODEL, _OLLAMA_ADAPTER)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    kind, _, digest = str(digests[0]).partition(":") if len(digests) == 1 else ("", "", "")
    return root / "blobs" / f"sha256-{digest}" if kind == "sha256" and digest.isalnum() else None


def _folder_models() -> Iterator[StoredModel]:
    # LM Studio stores publisher/repository/file; llama.cpp has a single folder.
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
        return Path("/nonexistent")  # a service may run under a user id without an account


def notso_cache() -> Path:
    """Return notso's cache folder."""
    try:
        return platformdirs.user_cache_path("notso")
    except RuntimeError:
        return _home() / ".cache/notso"


def _files(root: Path, pattern: str) -> list[Path]:
    # Path.glob would stop at an unreadable folder, and Path.is_file would raise an error.
    found = (root / name for name in glob.glob(pattern, root_dir=root, include_hidden=True))  # noqa: PTH207
    return sorted(path for path in found if os.path.isfile(path))  # noqa: PTH113


# Receives the activity ("downloading", "checking"), bytes done and total bytes.
Progress = Callable[[str, int, int], None]

Verified = Literal["yes", "no", "wrong size", "built in"]
Where = Literal["built in", "cache", "folder"] | Store

_HASH_CHUNK_BYTES = 4 << 20
DEMO_QUANTIZATION = "Q4_K_M"  # a constant, because the file name does not contain it, and reading the file is slow
_QUANTIZATION = re.compile(r"(?i)(?:^|[-_.])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|BF16|F16|F32))(?=[-_.]|$)")


_SHA256 = re.compile(r"[0-9a-f]{64}")
# Suffix of a file that contains only a part of a model. A file -00001-of-00001 contains a whole model.
PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A published model file."""

    name: str
    repository: str
    revision: str
    filename: str
    size_bytes: int
    sha256: str

    @property
    def quantization(self) -> str:
        return quantization_in(self.filename) or ""


_REPOSITORY = "ggml-org/SmolLM3-3B-GGUF"
_REVISION = "4965cb60b150737b68a0408c36aeefb65078f894"

KNOWN_FILES: tuple[KnownFile, ...] = (
    KnownFile(
        name="smollm3-3b:Q4_K_M",
        repository=_REPOSITORY,
        revision=_REVISION,
        filename="SmolLM3-Q4_K_M.gguf",
        size_bytes=1_915_305_312,
        sha256="8334b850b7bd46238c16b0c550df2138f0889bf433809008cc17a8b05761863e",
    ),
    KnownFile(
        name="smollm3-3b:Q8_0",
        repository=_REPOSITORY,
        revision=_REVISION,
        filename="SmolLM3-Q8_0.gguf",
        size_bytes=3_275_574_624,
        sha256="8aa8cc74656137174a1988d993b00828e65a86fd68773412b632a75aa1373248",
    ),
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model file on this machine."""

    # `verified` is "yes" only if the SHA-256 matches that of a published file. `is_smollm3` can be False only for files
    # in folders given by the user.
    name: str
    path: Path
    size_bytes: int
    quantization: str
    where: Where
    verified: Verified
    is_smollm3: bool = True


def official_files() -> tuple[KnownFile, ...]:
    """Return the official files, starting with the default."""
    return KNOWN_FILES


def official_file(name: str) -> KnownFile | None:
    """Return the official file for a name such as `smollm3-3b`, `Q8_0`, `owner/repository:Q8_0` or a file name."""
    normalized = name.strip().lower()
    model, _, quantization = normalized.partition(":")
    for file in KNOWN_FILES:
        spellings = {file.name.lower(), file.filename.lower(), file.quantization.lower()}
        models = {file.name.lower().partition(":")[0], "smollm3", file.repository.lower()}
        if normalized in spellings or (model in models and quantization in ("", file.quantization.lower())):
            return file
    return None


def known_file(name: str) -> KnownFile:
    """Return `official_file(name)`. Raises InvalidRequestError, which lists the choices."""
    file = official_file(name)
    if file is None:
        choices = ", ".join(file.name for file in KNOWN_FILES)
        raise InvalidRequestError(f"there is no official model file {name!r}; choices: {choices}", param="name")
    return file


def hub_cache() -> Path:
    """Return the Hugging Face cache folder."""
    home = os.environ.get("HF_HOME") or ""
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
    return Path(expand_home(os.path.expandvars(folder)))


def repository_folder(file: KnownFile) -> Path:
    """Return the cache folder of a file's repository."""
    return hub_cache() / ("models--" + file.repository.replace("/", "--"))


def blob_path(file: KnownFile) -> Path:
    """Return the path of a file's blob, whose name is its hash."""
    return repository_folder(file) / "blobs" / file.sha256


def cached_files(repository: str) -> list[Path]:
    """Return the GGUF files in a repository's cache folder, those of the latest download last."""
    return _files_by_download(hub_cache() / ("models--" + repository.replace("/", "--")))


def _snapshot_of(path: Path) -> Path:
    return hub_cache().joinpath(*path.relative_to(hub_cache()).parts[:3])


def _files_by_download(folder: Path) -> list[Path]:
    main, main_at = b"", 0
    with contextlib.suppress(OSError):  # refs/main is missing if only `notso pull` has written to this folder
        main, main_at = read_regular(folder / "refs/main", 64), (folder / "refs/main").stat().st_mtime_ns

    def downloaded_at(path: Path) -> int:
        # The link's time is used, because revisions with the same content share a blob. The time of refs/main counts,
        # too: if huggingface_hub downloads a revision whose files are already cached, it writes only this file.
        is_main = os.fsencode(path.relative_to(folder).parts[1]) == main.strip()
        return max(path.lstat().st_mtime_ns, main_at if is_main else 0)

    found: list[Path] = []
    with contextlib.suppress(OSError):  # the folder cannot be searched
        found += folder.glob("snapshots/*/**/*.gguf")
    files = [path for path in found if os.path.isfile(path)]  # noqa: PTH113 - also False if it cannot be read
    return sorted(files, key=lambda path: (downloaded_at(path), path))


def snapshot_path(file: KnownFile) -> Path:
    """Return the path of the link to `blob_path(file)`."""
    return repository_folder(file) / "snapshots" / file.revision / file.filename


def find_local(file: KnownFile) -> Path | None:
    """Return a cached copy of the expected size, from any revision; its hash is not computed."""
    path, snapshots = snapshot_path(file), repository_folder(file) / "snapshots"
    if _size(path) == file.size_bytes:
        return path
    return next((each for each in _files(snapshots, f"*/{glob.escape(file.filename)}") if _may_be(file, each)), None)


def _may_be(file: KnownFile, path: Path) -> bool:
    # A file of another revision can have the same size, so the hashes are compared. Where links are possible, the
    # cached file is a link to a file with its hash as the name.
    if _size(path) != file.size_bytes:
        return False
    name = path.resolve().name
    return (name if _SHA256.fullmatch(name) else stored_hash(path)) in (None, file.sha256)


def demo_path() -> Path:
    """Return the demo model's path."""
    return Path(__file__).parents[2] / "demo" / "demo.gguf"


def resolve_model(model_name: str | Path | None = None) -> Path | None:
    """Return the path of the model named by `model_name` or NOTSO_MODEL; default: a cached official file, or None.

    Raises ModelFileError if the model does not exist.
    """
    named = model_name or os.environ.get("NOTSO_MODEL")
    if named:
        path = Path(expand_home(named))
        reason, cause = "is neither a model file nor the name of an installed model", None
        try:
            if stat.S_ISDIR(found_type := file_type(path)):
                raise ModelFileError(f"{path} is a folder; convert it with `notso convert {path} OUT.gguf`")
            if found_type:
                return path
        except OSError as error:  # for example, a folder that cannot be searched
            reason, cause = f"cannot be read: {error.strerror}", error
        known = official_file(str(named))
        found = (find_local(known) if known is not None else None) or _installed(str(named))
        if found is None:
            raise ModelFileError(f"{path} {reason}") from cause
        return found
    return next(filter(None, map(find_local, KNOWN_FILES)), None)


def _installed(name: str) -> Path | None:
    named = [model for model in local_models() if model.name.lower() == name.lower()]
    cached = {model.path: _snapshot_of(model.path) for model in named if model.where == "cache"}
    latest: dict[Path, Path] = {}  # by repository
    for snapshot in cached.values():
        latest.setdefault(snapshot.parent, snapshot)
    current = [path for path, snapshot in cached.items() if snapshot in latest.values()]
    if len({(path.resolve().name, _size(path)) for path in current}) > 1:
        raise ModelFileError(f"several files are named {name}; specify the path: {', '.join(map(str, current))}")
    if named:
        return named[0].path
    # If a file has several names in the stores, `local_models` lists only one of them, so the stores are searched, too.
    stored = (model for model in (*_ollama_models(), *_folder_models()) if model.name.lower() == name.lower())
    return next((model.path for model in stored if is_smollm3(model.path)), None)


def local_models(folders: Iterable[Path] = ()) -> list[LocalModel]:
    """Return the demo, SmolLM3 files in the cache and stores, and all GGUF files directly in `folders`.

    Of each cached repository, the latest download comes first. Folders that cannot be searched are skipped.
    """
    models = []
    demo = demo_path()
    if demo.is_file():
        models.append(LocalModel("demo", demo, demo.stat().st_size, DEMO_QUANTIZATION, "built in", "built in"))
    models += [
        _describe(path, "cache")
        for name in sorted(glob.glob("models--*", root_dir=hub_cache()))  # noqa: PTH207 - raises no error
        for path in reversed(_files_by_download(hub_cache() / name))
        if not PART.search(path.name) and ("smollm3" in path.name.lower() or is_smollm3(path))
    ]
    models += [_describe_stored(each.name, each.path, each.store) for each in stored_models()]
    for folder in folders:
        models += [_describe(path, "folder") for path in _files(folder, "*.gguf")]
    return models


def quantization_in(filename: str) -> str | None:
    """Return the quantization in a file name: `Q4_K_M` for `SmolLM3-Q4_K_M.gguf`."""
    found = _QUANTIZATION.search(filename)
    return found.group(1) if found else None


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """Return a file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as source:  # noqa: PTH123 - a descriptor
        total = os.fstat(source.fileno()).st_size
        while chunk := source.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress("checking", source.tell(), total)
    return digest.hexdigest()


def find_by_hash(sha256: str) -> KnownFile | None:
    """Return the known file with this hash, or None."""
    return next((file for file in KNOWN_FILES if file.sha256 == sha256), None)


_writing_ledger = threading.Lock()


def store_hash(path: Path, sha256: str) -> None:
    """Store a hash with the file's path, size and modification time."""
    target = _ledger_path()
    # The lock serializes writers in this process only. An entry can be lost if another process writes at the same time,
    # or if the folder is not writable. This is harmless, because a file without an entry is hashed again.
    with _writing_ledger, contextlib.suppress(OSError):
        ledger = _read_ledger()
        ledger[str(path.resolve())] = [*_fingerprint(path), sha256]
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(ledger))
        temporary.replace(target)


def stored_hash(path: Path) -> str | None:
    """Return the stored hash, or None if it is missing or the file has changed."""
    entry = _read_ledger().get(str(path.resolve()))
    if not isinstance(entry, list) or len(entry) != 3 or entry[:2] != _fingerprint(path):
        return None
    return str(entry[2])


def _describe_stored(name: str, path: Path, where: Store) -> LocalModel:
    # Ollama names files by hash, so the name in the store replaces the file name.
    found = _describe(path, where)
    return replace(found, name=name, quantization=found.quantization or quantization_in(name.replace(":", "-")) or "")


def _describe(path: Path, where: Where) -> LocalModel:
    size = path.stat().st_size
    sha256 = stored_hash(path)
    known = find_by_hash(sha256) if sha256 else None
    same_name = next((file for file in KNOWN_FILES if file.filename == path.name), None)
    if where == "cache" and same_name is not None and _snapshot_of(path).parents[1] != repository_folder(same_name):
        same_name = None
    verified: Verified = "no"
    if known is not None:
        verified = "yes"
    elif where == "cache" and same_name is not None and same_name.size_bytes != size:
        verified = "wrong size"
    known = known or (same_name if same_name is not None and _may_be(same_name, path) else None)
    return LocalModel(
        name=known.name if known else path.stem,
        path=path,
        size_bytes=size,
        quantization=quantization_in(path.name) or "",
        where=where,
        verified=verified,
        is_smollm3=where != "folder" or is_smollm3(path),
    )


def _ledger_path() -> Path:
    return notso_cache() / "verified.json"


def _read_ledger() -> dict[str, object]:
    ledger = None
    with contextlib.suppress(OSError):
        ledger = json_or_none(_ledger_path().read_bytes())
    return ledger if isinstance(ledger, dict) else {}


def _fingerprint(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# How to remove files that other programs manage.
OWNERS = {
    "ollama": "remove it with `ollama rm`",
    "lm studio": "remove it in LM Studio",
    "llama.cpp": "delete the file itself",
}


def find_fetched_model(name: str) -> LocalModel:
    """Return a model in the Hugging Face cache by name or path. Raises InvalidRequestError."""
    known = official_file(name)
    names = {name.strip().lower(), *([] if known is None else [known.name.lower()])}
    found = [model for model in local_models() if model.name.lower() in names or str(model.path) == name]
    cached = [model for model in found if model.where == "cache"]
    if len({model.path.resolve() for model in cached}) > 1:
        raise InvalidRequestError(f"several files are named {name}; specify the path", param="name")
    if cached:
        return cached[0]
    if not found:
        raise InvalidRequestError(f"there is no model {name!r}; `notso list` shows the installed models", param="name")
    if found[0].where == "built in":
        raise InvalidRequestError("the demo model is part of the program", param="name")
    advice = OWNERS.get(found[0].where, "delete the file itself")
    raise InvalidRequestError(f"{name} was not downloaded by `notso pull`: {advice}", param="name")


def remove(model: LocalModel) -> int:
    """Remove a cached file and its links; return the number of bytes freed."""
    blob, snapshots = model.path.resolve(), _snapshot_of(model.path).parent
    freed = blob.stat().st_size
    for name in [*snapshots.glob("*/**/*")]:
        if name.resolve() == blob:
            name.unlink()
            folder = name.parent
            while folder != snapshots and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent
    blob.unlink(missing_ok=True)
    return freed
