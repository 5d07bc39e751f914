"""Write model files with random weights in SmolLM3's shapes and block formats, for benchmarks and tests.

A full-size model has 326 tensors, with the sizes and formats of the official Q4_K_M file (216 Q4_K, 37 Q6_K, 73 F32).
The tokenizer and chat template are taken from another file; reserved tokens fill the rest of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from notso.qtensor import F32, FORMATS_BY_NAME, Q4_K, Q6_K, Format, GGUFFile, GGUFWriter, random_blocks
from notso.smollm3.conversion.converter import general_entries
from notso.smollm3.conversion.hf_config import Entries
from notso.smollm3.errors import InvalidRequestError, ModelFileError, require
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weights import Q4_K_M, has_more_bits
from notso.smollm3.text.tokenizer_pipeline import PIPELINE_KEY, tokenizer_entries
from notso.smollm3.text.vocabulary import CONTROL, gguf_list

CHUNK_BYTES = 8 << 20
OFFICIAL_FORMATS = "official"

Progress: TypeAlias = Callable[[int, int], None]  # bytes written, total bytes
TokenizerSource: TypeAlias = Mapping[str, Any] | GGUFFile | str | Path


@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """Dimensions of a SmolLM3 model. Raises InvalidRequestError."""

    layers: int = 36
    hidden: int = 2048
    ffn: int = 11008
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 128256

    def __post_init__(self) -> None:
        for name, limit in (
            ("layers", 256),
            ("hidden", 32768),
            ("ffn", 131072),
            ("heads", 256),
            ("kv_heads", 256),
            ("vocab", 1_000_000),
        ):
            value = getattr(self, name)
            is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            require(is_whole and 1 <= value <= limit, name, f"a whole number from 1 to {limit:,}")
            object.__setattr__(self, name, int(value))  # numpy's small integer types could overflow
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InvalidRequestError(
                f"hidden ({self.hidden}) must be divisible into {self.heads} heads of even size", param="heads"
            )
        if self.heads % self.kv_heads:
            raise InvalidRequestError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})", param="kv_heads"
            )

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads


def synthetic_tensors(
    shape: SyntheticShape, formats: str = OFFICIAL_FORMATS
) -> list[tuple[str, tuple[int, ...], Format]]:
    """Return each tensor's name, numpy shape and format, in file order.

    `formats`: "official" (Q4_K_M) or one format for all matrices; norms are always F32. Raises InvalidRequestError.
    """
    if formats != OFFICIAL_FORMATS and formats not in FORMATS_BY_NAME:
        choices = ", ".join([OFFICIAL_FORMATS, *FORMATS_BY_NAME])
        raise InvalidRequestError(f"formats {formats!r} is unknown; choices: {choices}", param="formats")
    base, better = (Q4_K, Q6_K) if formats == OFFICIAL_FORMATS else (FORMATS_BY_NAME[formats],) * 2
    for name in ("hidden", "ffn"):
        if getattr(shape, name) % base.block_values:
            raise InvalidRequestError(
                f"{name} {getattr(shape, name)} must be a multiple of {base.block_values} for {base.name}", param=name
            )
    tensors: list[tuple[str, tuple[int, ...], Format]] = [("token_embd", (shape.vocab, shape.hidden), better)]
    for i in range(shape.layers):
        chosen = better if has_more_bits(i, shape.layers) else base
        tensors += [
            (f"blk.{i}.attn_norm", (shape.hidden,), F32),
            (f"blk.{i}.attn_q", (shape.hidden, shape.hidden), base),
            (f"blk.{i}.attn_k", (shape.kv_width, shape.hidden), base),
            (f"blk.{i}.attn_v", (shape.kv_width, shape.hidden), chosen),
            (f"blk.{i}.attn_output", (shape.hidden, shape.hidden), base),
            (f"blk.{i}.ffn_norm", (shape.hidden,), F32),
            (f"blk.{i}.ffn_gate", (shape.ffn, shape.hidden), base),
            (f"blk.{i}.ffn_up", (shape.ffn, shape.hidden), base),
            (f"blk.{i}.ffn_down", (shape.hidden, shape.ffn), chosen),
        ]
    tensors.append(("output_norm", (shape.hidden,), F32))
    return [(f"{name}.weight", sides, format) for name, sides, format in tensors]


def write_synthetic(
    path: str | Path,
    *,
    layers: int = 36,
    hidden: int = 2048,
    ffn: int = 11008,
    heads: int = 16,
    kv_heads: int = 4,
    vocab: int = 128256,
    tokenizer: TokenizerSource | None = None,
    template: str | None = None,
    seed: int = 0,
    formats: str = OFFICIAL_FORMATS,
    progress: Progress = lambda written, total: None,
) -> int:
    """Write a GGUF file of random weights, which depend only on the arguments; return the size of its tensors in bytes.

    tokenizer: GGUF file, metadata or `tokenizer.json`; default: the demo model's. template: chat template; default: the
    tokenizer file's, a `chat_template.jinja` next to it, or the demo model's. Raises InvalidRequestError for invalid
    sizes, ModelFileError for an unusable tokenizer, GGUFError or OSError.
    """
    shape = SyntheticShape(layers, hidden, ffn, heads, kv_heads, vocab)
    tensors = synthetic_tensors(shape, formats)
    entries = _config_entries(shape, formats) | _tokenizer_entries(tokenizer, vocab, template)
    # No fsync, because a lost file can be written again.
    writer = GGUFWriter(path, durable=False, progress=progress)
    for key, (value, type_name) in entries.items():
        writer.add(key, value, type_name)

    def weights(index: int, sides: tuple[int, ...], format: Format) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        rng = np.random.Generator(np.random.SFC64([seed, index]))
        left = int(np.prod(sides)) // format.block_values
        while left:
            count = min(left, CHUNK_BYTES // format.block_bytes)
            if len(sides) == 1:
                yield (1 + 0.1 * rng.standard_normal(count)).astype("<f4").view(np.uint8)
            else:
                yield random_blocks(format, count, rng, 0.02 * (2048 / hidden) ** 0.5).reshape(-1)
            left -= count

    for index, (name, sides, format) in enumerate(tensors):
        writer.add_tensor(name, sides, format, weights(index, sides, format))
    writer.write()
    return writer.tensor_bytes


def _config_entries(shape: SyntheticShape, formats: str) -> Entries:
    mix = Q4_K_M if formats == OFFICIAL_FORMATS else formats
    return {
        **general_entries("Random weights in the shapes of SmolLM3", mix),
        "smollm3.block_count": (shape.layers, "uint32"),
        "smollm3.context_length": (65536, "uint32"),
        "smollm3.embedding_length": (shape.hidden, "uint32"),
        "smollm3.feed_forward_length": (shape.ffn, "uint32"),
        "smollm3.attention.head_count": (shape.heads, "uint32"),
        "smollm3.attention.head_count_kv": (shape.kv_heads, "uint32"),
        "smollm3.rope.freq_base": (5_000_000.0, "float32"),
        "smollm3.rope.dimension_count": (shape.hidden // shape.heads, "uint32"),
        "smollm3.attention.layer_norm_rms_epsilon": (1e-6, "float32"),
        "smollm3.vocab_size": (shape.vocab, "uint32"),
    }


def _tokenizer_entries(source: TokenizerSource | None, vocab: int, template: str | None) -> Entries:
    metadata = _tokenizer_metadata(source)
    tokens = gguf_list(metadata, "tokenizer.ggml.tokens", str)
    kinds = gguf_list(metadata, "tokenizer.ggml.token_type", int)
    if len(tokens) != len(kinds):
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(kinds)} entries, but there are {len(tokens)} tokens")
    if vocab < len(tokens):
        raise InvalidRequestError(f"vocab {vocab} is smaller than the tokenizer's {len(tokens)} tokens", param="vocab")
    taken, number = set(tokens), 0
    while len(tokens) < vocab:
        name = f"<|reserved_special_token_{number}|>"
        if name not in taken:
            tokens.append(name)
            kinds.append(CONTROL)
        number += 1
    entries: Entries = {
        "tokenizer.ggml.model": (metadata.get("tokenizer.ggml.model", "gpt2"), "string"),
        "tokenizer.ggml.pre": (metadata.get("tokenizer.ggml.pre", "smaug-bpe"), "string"),
        "tokenizer.ggml.tokens": (tokens, "array of string"),
        "tokenizer.ggml.token_type": (kinds, "array of int32"),
        "tokenizer.ggml.merges": (gguf_list(metadata, "tokenizer.ggml.merges", str), "array of string"),
    }
    if (pipeline := metadata.get(PIPELINE_KEY)) is not None:
        entries[PIPELINE_KEY] = (pipeline, "string")
    for name in ("bos_token_id", "eos_token_id", "padding_token_id"):
        if (value := metadata.get(f"tokenizer.ggml.{name}")) is not None:
            entries[f"tokenizer.ggml.{name}"] = (value, "uint32")
    text = template if template is not None else metadata.get("tokenizer.chat_template")
    if text is None:
        text = _open_demo().metadata.get("tokenizer.chat_template")
    entries["tokenizer.chat_template"] = (text, "string")
    return entries


def _open_demo() -> GGUFFile:
    if not demo_path().is_file():
        raise InvalidRequestError("the demo model is missing: specify a tokenizer and a template", param="tokenizer")
    return GGUFFile.open(demo_path())


def _tokenizer_metadata(source: TokenizerSource | None) -> Mapping[str, Any]:
    if source is None:
        return _open_demo().metadata
    if isinstance(source, GGUFFile):
        return source.metadata
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    return tokenizer_entries(path) if path.suffix == ".json" else GGUFFile.open(path).metadata
