"""Models with random weights that any machine can reproduce bit for bit with NumPy.

Weights are derived from raw words of a bit generator, whose streams are stable across NumPy versions. They are written
in the layout of a converter: rows of q and k in the order of adjacent pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor.formats import F32
from notso.qtensor.gguf_writer import GGUFWriter
from notso.smollm3.diagnostics.synth import write_synthetic

Floats = npt.NDArray[np.float32]

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
SPECIALS = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model whose sizes differ from each other, from the demo model and from the 3B as far as possible: three query
    heads per key, head sizes that do not add up to the hidden size, an odd vocabulary size, and an eps large enough for
    its absence to be noticed."""

    seed: int = 7
    layers: int = 8
    hidden: int = 384
    ffn: int = 640
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 48
    vocab: int = 1503
    context: int = 512
    theta: float = 5e6
    eps: float = 2.0**-10
    tied: bool = True

    def tensors(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return (shape in NumPy order, standard deviation) by name. With these deviations, attention focuses on few
        positions, every layer affects the result, and the next token is rarely a repetition."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        by_hidden = self.hidden**-0.5
        shapes: dict[str, tuple[tuple[int, ...], float]] = {"token_embd": ((self.vocab, self.hidden), 0.2)}
        for layer in range(self.layers):
            shapes |= {
                f"blk.{layer}.attn_norm": ((self.hidden,), 0.2),
                f"blk.{layer}.attn_q": ((q, self.hidden), 1.2 * by_hidden),
                f"blk.{layer}.attn_k": ((kv, self.hidden), 1.2 * by_hidden),
                f"blk.{layer}.attn_v": ((kv, self.hidden), by_hidden),
                f"blk.{layer}.attn_output": ((self.hidden, q), q**-0.5),
                f"blk.{layer}.ffn_norm": ((self.hidden,), 0.2),
                f"blk.{layer}.ffn_gate": ((self.ffn, self.hidden), by_hidden),
                f"blk.{layer}.ffn_up": ((self.ffn, self.hidden), by_hidden),
                f"blk.{layer}.ffn_down": ((self.hidden, self.ffn), self.ffn**-0.5),
            }
        shapes["output_norm"] = ((self.hidden,), 0.2)
        if not self.tied:
            shapes["output"] = ((self.vocab, self.hidden), 0.2)
        return {f"{name}.weight": value for name, value in shapes.items()}

    def weights(self) -> Iterator[tuple[str, Floats]]:
        """Yield name and float32 values of every tensor, uniformly distributed: around 1 for norms, otherwise around
        0."""
        for index, (name, (shape, deviation)) in enumerate(self.tensors().items()):
            values = even(self.seed, index, int(np.prod(shape))) * np.float32(deviation * 3**0.5)
            yield name, (values + np.float32(len(shape) == 1)).reshape(shape)

    def write(self, path: Path, *, context: int | None = None) -> Path:
        """Write the model as an F32 file. `context` replaces the trained context."""
        with GGUFWriter(path, durable=False) as writer:
            writer.add("general.architecture", "smollm3", "string")
            writer.add("general.name", "random weights", "string")
            for key, value in {
                "block_count": self.layers,
                "context_length": context or self.context,
                "embedding_length": self.hidden,
                "feed_forward_length": self.ffn,
                "attention.head_count": self.heads,
                "attention.head_count_kv": self.kv_heads,
                "attention.key_length": self.head_dim,
                "attention.value_length": self.head_dim,
                "rope.dimension_count": self.head_dim,
                "vocab_size": self.vocab,
            }.items():
                writer.add(f"smollm3.{key}", value, "uint32")
            writer.add("smollm3.rope.freq_base", self.theta, "float32")
            writer.add("smollm3.attention.layer_norm_rms_epsilon", self.eps, "float32")
            tokens = vocabulary(self.vocab)
            writer.add("tokenizer.ggml.model", "gpt2", "string")
            writer.add("tokenizer.ggml.pre", "smaug-bpe", "string")
            writer.add("tokenizer.ggml.tokens", tokens, "array of string")
            writer.add("tokenizer.ggml.token_type", [SPECIALS.get(token, NORMAL) for token in tokens], "array of int32")
            writer.add("tokenizer.ggml.merges", ["a b"], "array of string")
            writer.add("tokenizer.ggml.eos_token_id", tokens.index("<|im_end|>"), "uint32")
            for name, values in self.weights():
                writer.add_tensor(name, values.shape, F32, values.astype("<f4", copy=False).view(np.uint8))
        return path

    def prompts(self, count: int, longest: int) -> list[list[int]]:
        """Return lists of 1 to `longest` random ids; the last list has exactly `longest`."""
        words = np.random.PCG64([self.seed, 999]).random_raw(count * (longest + 1)).reshape(count, -1)
        lengths = [*(1 + words[:-1, 0] % longest).tolist(), longest]
        return [(row[1 : 1 + n] % self.vocab).tolist() for row, n in zip(words, lengths, strict=True)]


def vocabulary(size: int) -> list[str]:
    """Return the smallest byte-level vocabulary with reasoning tags, padded to `size`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    tokens = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    tokens += ["ab", *SPECIALS]  # one merge, because llama.cpp requires one
    return tokens + [f"word{number}" for number in range(size - len(tokens))]


def even(seed: int, index: int, count: int) -> Floats:
    """Return `count` float32 values, uniformly distributed in -1..1: 24 bits from each half of a raw word."""
    words = np.random.PCG64([seed, index]).random_raw(-(-count // 2)).astype("<u8").view("<u4")[:count]
    return (words >> 8).astype(np.float32) * np.float32(2**-23) - np.float32(1 - 2**-24)


RANDOM = RandomModel()
"""A model with eight layers in F32, compared with transformers."""

YARN_CONTEXT = 96
"""Trained context in the YaRN comparison, so that 192 positions require YaRN."""

SHAPES_3B_VOCAB = 4096


def write_shapes_3b(path: Path) -> Path:
    """Write random blocks with the shapes and formats of the 3B, with 4 layers and a small vocabulary: 160 MB."""
    return write_random_blocks(path, layers=4, vocab=SHAPES_3B_VOCAB)


def write_random_blocks(path: Path, *, vocab: int, **sizes: int) -> Path:
    """Write random blocks in the formats of a Q4_K_M file, with `notso synth`; `sizes` replaces the 3B's."""
    tokens = vocabulary(vocab)
    words = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [SPECIALS.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    write_synthetic(path, vocab=vocab, tokenizer=words, template="{{ messages }}", seed=11, **sizes)
    return path


def shapes_3b_lists() -> list[list[int]]:
    """Return two lists of random ids."""
    ids = (np.random.PCG64(12).random_raw(160) % SHAPES_3B_VOCAB).tolist()
    return [ids[:32], ids[32:]]
