"""Model weights by role; the only module that knows GGUF tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from notso.qtensor import F32, Array, Backend, QTensor, Weight
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError, quoted


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices (outputs, inputs) and norms (hidden,) float32."""

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
        """Replace each matrix by `change(matrix)`."""
        return replace(self, **{name: change(getattr(self, name)) for name in MATRICES})

    def with_norms(self, change: Callable[[Any], Array]) -> LayerWeights:
        return replace(self, **{name: change(getattr(self, name)) for name in NORMS})


NORMS = ("input_layernorm", "post_attention_layernorm")
MATRICES = tuple(field.name for field in fields(LayerWeights) if field.name not in NORMS)
# Matrices that a step reads in turns, and each other one by itself; in the order of MATRICES.
READ_TOGETHER = (("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
# GGUF names, between `blk.N.` and `.weight`.
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


@dataclass(frozen=True, slots=True)
class SmolLM3Weights:
    """All weights; `lm_head` is `embed_tokens` if tied, as in the official files."""

    embed_tokens: Weight
    layers: tuple[LayerWeights, ...]
    norm: Array
    lm_head: Weight

    def on(self, backend: Backend) -> SmolLM3Weights:
        """Upload to a backend."""
        embed = backend.weight(self.embed_tokens)
        return SmolLM3Weights(
            embed,
            tuple(layer.with_matrices(backend.weight).with_norms(backend.upload) for layer in self.layers),
            backend.upload(self.norm),
            embed if self.lm_head is self.embed_tokens else backend.weight(self.lm_head),
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, QTensor], config: SmolLM3Config) -> SmolLM3Weights:
        """Assign tensors to roles. Raises ModelFileError for missing, misshapen or unused ones."""
        left = dict(tensors)
        hidden = config.hidden_size

        def matrix(name: str, rows: int, cols: int) -> QTensor:
            tensor = left.pop(name, None)
            if tensor is None:
                raise ModelFileError(f"the file has no tensor {name!r}")
            if tensor.shape != (rows, cols):
                raise ModelFileError(
                    f"tensor {name!r} has shape {tensor.shape}, but but the configuration implies {(rows, cols)}"
                )
            return tensor

        def norm(name: str) -> Array:
            tensor = left.pop(name, None)
            if tensor is None:
                raise ModelFileError(f"the file has no tensor {name!r}")
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
        head = matrix("output.weight", config.vocab_size, hidden) if "output.weight" in left else embed
        if left:
            raise ModelFileError(f"the file has a tensor that the model does not use: {quoted(min(left))}")
        return cls(embed, layers, final_norm, head)


def matrix_shapes(config: SmolLM3Config) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) by name in `LayerWeights`."""
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
