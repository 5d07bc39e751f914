"""The model's weights by role. The only place that knows a GGUF file's tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from notso.qtensor.formats import F32
from notso.qtensor.tensor import QTensor
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError, quoted

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are (outputs, inputs); norms are (hidden,) float32."""

    attn_norm: Floats
    q_proj: QTensor
    k_proj: QTensor
    v_proj: QTensor
    o_proj: QTensor
    ffn_norm: Floats
    gate_proj: QTensor
    up_proj: QTensor
    down_proj: QTensor


@dataclass(frozen=True, slots=True)
class SmolLM3Weights:
    """All weights. `lm_head` is `embed_tokens` where the file ties them, as the official ones do."""

    embed_tokens: QTensor
    layers: tuple[LayerWeights, ...]
    norm: Floats
    lm_head: QTensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, QTensor], config: SmolLM3Config) -> SmolLM3Weights:
        """Give every tensor of the file its role.

        Raises ModelFileError naming a tensor that is missing, has another shape than the configuration implies, or
        would not be used.
        """
        left = dict(tensors)
        hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        queries, ffn = config.num_attention_heads * config.head_dim, config.intermediate_size

        def matrix(name: str, rows: int, cols: int) -> QTensor:
            tensor = left.pop(name, None)
            if tensor is None:
                raise ModelFileError(f"the file lacks the tensor {name!r}")
            if tensor.shape != (rows, cols):
                raise ModelFileError(
                    f"tensor {name!r} has shape {tensor.shape}, the configuration implies {(rows, cols)}"
                )
            return tensor

        def norm(name: str) -> Floats:
            tensor = left.pop(name, None)
            if tensor is None:
                raise ModelFileError(f"the file lacks the tensor {name!r}")
            if tensor.shape != (hidden,) or tensor.format != F32:
                raise ModelFileError(f"tensor {name!r} must be F32 of shape {(hidden,)}")
            return tensor.as_float32()

        embed = matrix("token_embd.weight", config.vocab_size, hidden)
        layers = tuple(
            LayerWeights(
                attn_norm=norm(f"blk.{i}.attn_norm.weight"),
                q_proj=matrix(f"blk.{i}.attn_q.weight", queries, hidden),
                k_proj=matrix(f"blk.{i}.attn_k.weight", kv, hidden),
                v_proj=matrix(f"blk.{i}.attn_v.weight", kv, hidden),
                o_proj=matrix(f"blk.{i}.attn_output.weight", hidden, queries),
                ffn_norm=norm(f"blk.{i}.ffn_norm.weight"),
                gate_proj=matrix(f"blk.{i}.ffn_gate.weight", ffn, hidden),
                up_proj=matrix(f"blk.{i}.ffn_up.weight", ffn, hidden),
                down_proj=matrix(f"blk.{i}.ffn_down.weight", hidden, ffn),
            )
            for i in range(config.num_hidden_layers)
        )
        final_norm = norm("output_norm.weight")
        head = matrix("output.weight", config.vocab_size, hidden) if "output.weight" in left else embed
        if left:
            raise ModelFileError(f"the file holds a tensor this model does not use: {quoted(min(left))}")
        return cls(embed, layers, final_norm, head)
