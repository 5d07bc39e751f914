"""Configure an engine with keyword arguments or JSON."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from notso.smollm3.errors import InvalidRequestError, require
from notso.smollm3.values.request_options import require_known

KVChoice: TypeAlias = Literal["auto", "f16", "k8v8", "k8v4", "k4v4", "k4v3"]
KV_CHOICES: tuple[KVChoice, ...] = get_args(KVChoice)

Placement: TypeAlias = Literal["auto", "mmap", "packed", "hugepages"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

MAX_THREADS = 1024
MAX_NUM_SEQS = 64

DEFAULT_CACHE_BYTES = 4 * 10**9  # for cached conversations on disk; enough for about 100,000 tokens of the 3B model
DOCUMENT_TOKENS = 65_536  # the model's trained context
DEFAULT_LIBRARY_BYTES = 20 * 10**9  # on disk, for named prompt prefixes (FixedPrefix.reading)

DEVICES = "auto, cpu, cuda or cuda:N"


# Python represents undecodable bytes of a path as the surrogates U+DC80 to U+DCFF.
_NOT_IN_PATHS = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """JSON-compatible settings of a loaded model.

    model: as in `Engine.load`. None: the demo model.
    context_tokens: capacity for a prompt and its answer, at most the model's maximum (YaRN doubles the trained
        context). None: up to 8,192, as memory allows.
    document_tokens: if context_tokens is None, desired capacity for prompts with a fixed prefix, such as documents.
        Limited to the trained context and to half of the remaining memory. Cache memory is allocated only when used.
    threads: CPU threads. None: one per physical core.
    weights: "mmap" uses the memory-mapped file. "packed" (formerly "hugepages") copies weights to 2 MiB pages in the
        background, in a packed layout if the kernels support it. "auto" copies weights if possible and worthwhile, and
        packs them if this makes no operation slower.
    kv: KV cache format. "auto": selected according to model, context and memory.
    max_num_seqs: maximum number of concurrent sequences. None: up to 16, as memory allows.
    speculation: use draft tokens where worthwhile; results are unchanged.
    cache_dir: private folder for up to `cache_bytes` of KV blocks, which survive restarts. None: no disk cache.
    library_bytes: separate limit in cache_dir for named prefixes (`FixedPrefix.reading`).
    device: "cpu"; "cuda" or "cuda:N", which require a usable GPU; or "auto": the first GPU, or the CPU if that GPU
        cannot run the model. Results are the same on all devices.
    adapters: LoRA adapters, each NAME=FILE or NAME=FILE:SCALE.
    chat_template_file: Jinja template that replaces the model file's.
    beside_bytes: memory planned for other engines in this process. If set, defaults that do not fit raise
        OutOfMemoryError instead of being reduced.

    Raises InvalidRequestError with the field as `param`.
    """

    model: str | None = None
    context_tokens: int | None = None
    threads: int | None = None
    weights: Placement = "auto"
    kv: KVChoice = "auto"
    max_num_seqs: int | None = None
    speculation: bool = True
    cache_dir: str | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    library_bytes: int = DEFAULT_LIBRARY_BYTES
    device: str = "auto"
    adapters: tuple[str, ...] = ()
    chat_template_file: str | None = None
    beside_bytes: int | None = None
    document_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "cache_dir", "chat_template_file"):
            path = getattr(self, name)
            require(path is None or isinstance(path, str), name, "a path, as a string")
            if path is not None and name != "model":  # `model` may also be the name of an installed model
                require(not _NOT_IN_PATHS.search(path), name, "a path without NUL characters or lone surrogates")
                object.__setattr__(self, name, expand_home(path))
        require(_is_count(self.context_tokens, 1), "context_tokens", "a positive whole number")
        require(_is_count(self.threads, 1, MAX_THREADS), "threads", f"a whole number from 1 to {MAX_THREADS:,}")
        require(self.weights in PLACEMENTS, "weights", f"{', '.join(PLACEMENTS[:-1])} or {PLACEMENTS[-1]}")
        require(self.kv in KV_CHOICES, "kv", f"one of {', '.join(KV_CHOICES)}")
        is_count = _is_count(self.max_num_seqs, 1, MAX_NUM_SEQS)
        require(is_count, "max_num_seqs", f"a whole number from 1 to {MAX_NUM_SEQS}")
        require(isinstance(self.speculation, bool), "speculation", "true or false")
        for name in ("cache_bytes", "library_bytes", "document_tokens"):
            size = getattr(self, name)
            require(size is not None and _is_count(size, 0), name, "a whole number, 0 or more")
        require(is_device(self.device), "device", DEVICES)
        require(_is_count(self.beside_bytes, 0), "beside_bytes", "a whole number, 0 or more")
        are_texts = isinstance(self.adapters, tuple) and all(isinstance(each, str) for each in self.adapters)
        require(are_texts, "adapters", "a list of NAME=FILE")
        for each in self.adapters:
            AdapterSource.parse(each)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Create a configuration from JSON or keyword arguments; paths can be path objects. Raises InvalidRequestError
        or UnknownOptionError."""
        require_known(settings, (each.name for each in fields(cls)), "an engine")
        paths = {name: fspath(value) for name, value in settings.items() if isinstance(value, PathLike)}
        lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
        return cls(**{**settings, **paths, **lists})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"adapters": list(self.adapters)}


expand_home = os.path.expanduser  # unlike Path.expanduser, this leaves names of unknown users unchanged


class EngineSettings(TypedDict, total=False):
    """Keyword arguments for the fields of EngineConfig, except `model`."""

    context_tokens: int | None
    document_tokens: int
    threads: int | None
    weights: Placement
    kv: KVChoice
    max_num_seqs: int | None
    speculation: bool
    cache_dir: str | PathLike[str] | None
    cache_bytes: int
    library_bytes: int
    device: str
    adapters: Sequence[str]
    chat_template_file: str | PathLike[str] | None
    beside_bytes: int | None


def is_device(name: object) -> bool:
    """Return whether `name` has a form in DEVICES."""
    return isinstance(name, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", name, re.ASCII) is not None


def _is_count(value: object, low: int, high: float = math.inf) -> bool:
    return value is None or (type(value) is int and low <= value <= high)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Adapter to load. Raises InvalidRequestError."""

    name: str
    path: str  # GGUF file or PEFT folder
    scale: float = 1.0  # factor for the scale in the file

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise InvalidRequestError(
                "an adapter's name consists of up to 64 letters, digits, dots, dashes and underscores, "
                "and begins with a letter or digit",
                param="adapters",
            )
        if not isinstance(self.path, str) or not self.path:
            raise InvalidRequestError(f"adapter {self.name} has no file", param="adapters")
        object.__setattr__(self, "path", expand_home(self.path))
        # `math.isfinite` would raise OverflowError for integers that are too large for a float.
        if not isinstance(self.scale, (int, float)) or not abs(self.scale) <= sys.float_info.max:
            raise InvalidRequestError(f"the scale of adapter {self.name} must be a number", param="adapters")

    @classmethod
    def parse(cls, text: str) -> AdapterSource:
        """Parse NAME=FILE[:SCALE]. Raises InvalidRequestError."""
        name, equals, rest = text.partition("=")
        if not equals:
            raise InvalidRequestError(f"{text!r} must be NAME=FILE or NAME=FILE:SCALE", param="adapters")
        path, colon, last = rest.rpartition(":")
        try:
            return cls(name, path, float(last)) if colon else cls(name, rest)
        except ValueError as error:
            if isinstance(error, InvalidRequestError):
                raise
            return cls(name, rest)  # the colon is part of the file name

    def __str__(self) -> str:
        return f"{self.name}={self.path}" + ("" if self.scale == 1.0 else f":{self.scale:g}")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter."""

    name: str
    path: str
    scale: float
    rank: int  # largest rank of any of its matrices
    size_bytes: int
    matrices: int
    digest: str = ""  # hash of the scaled values
