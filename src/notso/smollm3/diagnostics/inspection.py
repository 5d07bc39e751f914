"""Report the contents and memory requirements of a GGUF file as JSON-compatible values, without loading the model.

Files of other models are inspected, too; `problem` then states why this program cannot run the file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from notso.qtensor import GGUFFile, MemoryLimit, Metadata, QTensor, available_memory
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.memory_plan import kv_bytes_per_token, largest_context
from notso.smollm3.errors import ModelFileError
from notso.smollm3.hub import registry
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.text.chat_template import KNOWN_TEMPLATES
from notso.smollm3.text.vocabulary import CONTROL, USER_DEFINED

MAX_SHOWN_TEXT = 200  # characters; longer strings are omitted, or shortened if they are in an array
MAX_SHOWN_ITEMS = 16  # items; longer arrays are not shown
CONTEXTS = (8_192, 32_768, 65_536, 131_072)

Scalar: TypeAlias = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Entry:
    """Metadata entry. A `value` that is too long to show is None; `length` counts items or characters."""

    key: str
    type: str
    value: Scalar | tuple[Scalar, ...] | None
    length: int | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Tensor summary; `shape` is in numpy order (outputs, inputs)."""

    name: str
    format: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FormatTotal:
    """Totals for one block format."""

    format: str
    tensors: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Vocabulary and chat template of the file."""

    kind: str
    pre: str
    tokens: int
    merges: int
    control_tokens: int
    user_defined_tokens: int
    template_bytes: int | None
    template_sha256: str | None
    template_known: str | None  # name of a known template, or None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Memory for one KV format."""

    format: str
    bits_per_value: float
    bytes_per_token: int
    bytes_at: dict[int, int]  # context in tokens -> bytes
    fits_tokens: int  # longest supported context that fits in the available memory, in steps of 1,024 tokens


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Configuration and memory requirements of a SmolLM3 file."""

    config: dict[str, Any]
    nope_layers: tuple[int, ...]
    q6_k_layers: tuple[int, ...]  # where attn_v and ffn_down are both Q6_K
    tied_embeddings: bool
    weight_bytes_per_token: int  # bytes of weights read to decode one token
    kv_values_per_token: int
    cache: tuple[CachePlan, ...]
    available_bytes: int
    available_source: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of `inspect_file`. Sizes in bytes."""

    path: str
    size_bytes: int
    gguf_version: int
    alignment: int
    data_offset: int
    known_as: str | None  # name of a published file of the same size; only `verify` compares contents
    parameters: int
    tensor_bytes: int
    bits_per_parameter: float
    metadata: tuple[Entry, ...]
    formats: tuple[FormatTotal, ...]
    tensors: tuple[TensorInfo, ...]
    tokenizer: TokenizerInfo | None
    run: RunInfo | None
    problem: str | None

    def as_dict(self, *, tensors: bool = True) -> dict[str, Any]:
        """Return JSON values; non-finite numbers become text."""
        plain: dict[str, Any] = _to_json(asdict(self))
        if not tensors:
            del plain["tensors"]
        return plain


def inspect_file(path: str | Path) -> Inspection:
    """Inspect a GGUF file's header. Raises GGUFError."""
    with GGUFFile.open(path) as file:
        run, problem = None, None
        try:
            run = _run_info(file.metadata, file.tensors)
        except ModelFileError as error:
            problem = str(error)
        parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        tensor_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
        return Inspection(
            path=str(path),
            size_bytes=file.size_bytes,
            gguf_version=file.version,
            alignment=file.alignment,
            data_offset=file.data_offset,
            known_as=next((known.name for known in registry.KNOWN_FILES if known.size_bytes == file.size_bytes), None),
            parameters=parameters,
            tensor_bytes=tensor_bytes,
            bits_per_parameter=8 * tensor_bytes / parameters if parameters else 0.0,
            metadata=tuple(_entry(file, key) for key in file.metadata),
            formats=_format_totals(file.tensors),
            tensors=tuple(TensorInfo(t.name, t.format.name, t.shape, t.nbytes) for t in file.tensors.values()),
            tokenizer=_tokenizer_info(file.metadata),
            run=run,
            problem=problem,
        )


def _entry(file: GGUFFile, key: str) -> Entry:
    type_name, length = file.metadata_types[key], file.metadata.array_length(key)
    if length is not None:
        shown = tuple(_shorten(item) for item in file.metadata[key]) if length <= MAX_SHOWN_ITEMS else None
        return Entry(key, type_name, shown, length)
    value = file.metadata[key]
    if isinstance(value, str):
        return Entry(key, type_name, value if len(value) <= MAX_SHOWN_TEXT else None, len(value))
    return Entry(key, type_name, value, None)


def _shorten(item: Scalar) -> Scalar:
    return item[: MAX_SHOWN_TEXT - 1] + "…" if isinstance(item, str) and len(item) > MAX_SHOWN_TEXT else item


def _format_totals(tensors: Mapping[str, QTensor]) -> tuple[FormatTotal, ...]:
    groups: dict[str, list[QTensor]] = {}
    for tensor in tensors.values():
        groups.setdefault(tensor.format.name, []).append(tensor)
    totals = [
        FormatTotal(name, len(group), sum(math.prod(t.shape) for t in group), sum(t.nbytes for t in group))
        for name, group in groups.items()
    ]
    return tuple(sorted(totals, key=lambda total: -total.size_bytes))


def _tokenizer_info(metadata: Metadata) -> TokenizerInfo | None:
    # Values of the wrong type are skipped here; they are reported when the tokenizer is loaded.
    if "tokenizer.ggml.tokens" not in metadata:
        return None

    def text(key: str) -> str:
        value = metadata.get(key)
        return value if isinstance(value, str) else ""

    def count(key: str) -> int:
        return (metadata.array_length(key) or 0) if key in metadata else 0

    kinds = metadata["tokenizer.ggml.token_type"] if count("tokenizer.ggml.token_type") else []
    template = text("tokenizer.chat_template").encode()
    digest = hashlib.sha256(template).hexdigest() if template else None
    return TokenizerInfo(
        kind=text("tokenizer.ggml.model"),
        pre=text("tokenizer.ggml.pre"),
        tokens=count("tokenizer.ggml.tokens"),
        merges=count("tokenizer.ggml.merges"),
        control_tokens=kinds.count(CONTROL),
        user_defined_tokens=kinds.count(USER_DEFINED),
        template_bytes=len(template) or None,
        template_sha256=digest,
        template_known=KNOWN_TEMPLATES.get(digest) if digest else None,
    )


def weight_bytes_per_token(tensors: Mapping[str, QTensor], weights: SmolLM3Weights) -> int:
    """Return the number of bytes of weights that are read to decode one token."""
    # Decoding reads one row of the embedding matrix, and all other weights. If the embedding is tied, it is also the
    # output head, which is read completely.
    read: int = sum(tensor.nbytes for tensor in tensors.values()) + weights.embed_tokens.row_bytes
    return read if weights.lm_head is weights.embed_tokens else read - weights.embed_tokens.nbytes


def _run_info(metadata: Metadata, tensors: Mapping[str, QTensor]) -> RunInfo:
    config = SmolLM3Config.from_metadata(metadata)
    weights = SmolLM3Weights.from_tensors(tensors, config)
    memory = available_memory()
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return RunInfo(
        config=asdict(config),
        nope_layers=config.nope_layers,
        q6_k_layers=tuple(
            i
            for i, layer in enumerate(weights.layers)
            if layer.v_proj.format.name == layer.down_proj.format.name == "Q6_K"
        ),
        tied_embeddings=weights.lm_head is weights.embed_tokens,
        weight_bytes_per_token=weight_bytes_per_token(tensors, weights),
        kv_values_per_token=config.kv_values_per_token,
        cache=tuple(_cache_plan(kv_format, config, weight_bytes, memory) for kv_format in KV_FORMATS),
        available_bytes=memory.available_bytes,
        available_source=memory.source,
    )


def _cache_plan(kv_format: KVFormat, config: SmolLM3Config, weight_bytes: int, memory: MemoryLimit) -> CachePlan:
    per_token = kv_bytes_per_token(config, kv_format)
    return CachePlan(
        format=kv_format,
        bits_per_value=8 * per_token / config.kv_values_per_token,
        bytes_per_token=per_token,
        bytes_at={context: per_token * context for context in CONTEXTS},
        fits_tokens=largest_context(config, weight_bytes, kv_format, memory),
    )


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
