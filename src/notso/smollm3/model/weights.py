"""Model weights by role, and the GGUF names of their tensors.

This module also chooses the block format of each tensor in a file of a given type, such as Q4_K_M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from notso.qtensor import F32, FORMATS_BY_NAME, Q4_K, Q5_K, Q6_K, Array, Backend, Format, QTensor, Weight
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError, quoted

Number = TypeVar("Number", bound=np.generic)

Q4_K_M, Q5_K_M = "Q4_K_M", "Q5_K_M"
# Formats of most matrices in file types that mix formats; the other matrices are Q6_K.
MIXED = {Q4_K_M: Q4_K, Q5_K_M: Q5_K}

# ggml's `general.file_type` numbers.
FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14},
    **{"Q5_K": 16, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26},
    **{"IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, Q4_K_M: 15},
    Q5_K_M: 17,
}


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's attn_v and ffn_down use Q6_K (llama.cpp: use_more_bits)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def format_in(mix: str, name: str, dimensions: int, layers: int, *, is_tied: bool) -> Format:
    """Return a tensor's format in a file of type `mix`, such as Q4_K_M or Q8_0. `name` excludes `.weight`."""
    if dimensions == 1:
        return F32
    if mix not in MIXED:
        return FORMATS_BY_NAME[mix]
    # The matrix that produces the logits uses more bits.
    if name == "token_embd":
        return Q6_K if is_tied else MIXED[mix]
    if name == "output":
        return Q6_K
    _, layer, role = name.split(".")
    return Q6_K if role in ("attn_v", "ffn_down") and has_more_bits(int(layer), layers) else MIXED[mix]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's matrices, shape (outputs, inputs), and float32 norms, shape (hidden,)."""

    input_layernorm: Array
    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    post_attention_layernorm: Array
    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight

    def with_matrices(self, change: Callable[[Any], Weight]) -> LayerWeights:
        return replace(self, **{name: change(getattr(self, name)) for name in MATRICES})

    def with_norms(self, change: Callable[[Any], Array]) -> LayerWeights:
        return replace(self, **{name: change(getattr(self, name)) for name in NORMS})


NORMS = ("input_layernorm", "post_attention_layernorm")
MATRICES = tuple(field.name for field in fields(LayerWeights) if field.name not in NORMS)
# Groups of matrices, in the order of MATRICES. A step reads the matrices of a group together, one row of each in turn.
READ_TOGETHER = (("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
# GGUF names, without `blk.N.` and `.weight`.
TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def module_name(role: str) -> str:
    """Return a role's module name in transformers, within its layer."""
    if role in NORMS:
        return role
    return f"{'mlp' if role in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{role}"


def interleave_rope_rows(rows: npt.NDArray[Number], head_rows: int) -> npt.NDArray[Number]:
    """Return rows (outputs, n) of a query or key matrix in GGUF's order."""
    # RoPE rotates values in pairs. In transformers, the two values of a pair are half a head apart; in a GGUF file,
    # they are adjacent. With heads of 128 rows, row 128h + 2i of a GGUF file is row 128h + i of transformers, and row
    # 128h + 2i + 1 is row 128h + 64 + i.
    halves = rows.reshape(-1, 2, head_rows // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class SmolLM3Weights:
    """All weights; `lm_head` is `embed_tokens` if they are tied, as in the official files."""

    embed_tokens: Weight
    layers: tuple[LayerWeights, ...]
    norm: Array
    lm_head: Weight

    def to_device(self, backend: Backend) -> SmolLM3Weights:
        embed = backend.weight(self.embed_tokens)
        return SmolLM3Weights(
            embed,
            tuple(layer.with_matrices(backend.weight).with_norms(backend.upload) for layer in self.layers),
            backend.upload(self.norm),
            embed if self.lm_head is self.embed_tokens else backend.weight(self.lm_head),
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, QTensor], config: SmolLM3Config) -> SmolLM3Weights:
        """Assign tensors to roles. Raises ModelFileError if one is missing, unused or of the wrong shape."""
        unused = dict(tensors)
        hidden = config.hidden_size

        def pop_tensor(name: str) -> QTensor:
            if name not in unused:
                raise ModelFileError(f"the file has no tensor {name!r}")
            return unused.pop(name)

        def matrix(name: str, rows: int, cols: int) -> QTensor:
            tensor = pop_tensor(name)
            if tensor.shape != (rows, cols):
                raise ModelFileError(
                    f"tensor {name!r} has shape {tensor.shape}, but the configuration implies {(rows, cols)}"
                )
            return tensor

        def norm(name: str) -> Array:
            tensor = pop_tensor(name)
            if tensor.shape != (hidden,) or tensor.format != F32:
                raise ModelFileError(f"tensor {name!r} must be F32 of shape {(hidden,)}")
            return tensor.as_float32()

        embed = matrix("token_embd.weight", config.vocab_size, hidden)
        shapes = matrix_shapes(config)
        layers = tuple(
            LayerWeights(
                **{
                    role: matrix(f"blk.{i}.{name}.weight", *shapes[role])
                    if role in shapes
                    else norm(f"blk.{i}.{name}.weight")
                    for role, name in TENSOR_NAMES.items()
                }
            )
            for i in range(config.num_hidden_layers)
        )
        final_norm = norm("output_norm.weight")
        head = matrix("output.weight", config.vocab_size, hidden) if "output.weight" in unused else embed
        if unused:
            raise ModelFileError(f"the file has a tensor that the model does not use: {quoted(min(unused))}")
        return cls(embed, layers, final_norm, head)


def matrix_shapes(config: SmolLM3Config) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each matrix of `LayerWeights`."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
