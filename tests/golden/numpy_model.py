"""The whole model in NumPy with the reference operations, without our kernels; all rows of a text at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor.gguf import GGUFFile
from notso.qtensor.reference import kv_cache
from notso.qtensor.reference import ops as reference
from notso.qtensor.tensor import QTensor
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.model.weights import SmolLM3Weights

Floats = npt.NDArray[np.float32]
Matmul = Callable[[Floats, QTensor], Floats]
Attention = Callable[[Floats, Floats, Floats], Floats]
"""Attention function from position 0: q (L, H, D), k and v (L, KH, D) -> (L, H * D)."""

QUANTIZED: Matmul = reference.matmul
"""Product with activations rounded to bytes, as in the kernels."""

DEQUANTIZED: Matmul = reference.matmul_dequantized
"""Product with unrounded activations and dequantized weights."""


def float_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Compute attention in float64, without a cache."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(heads, group, axis=1).astype(np.float64) for heads in (k, v))
    scores = np.einsum("lhd,mhd->hlm", q.astype(np.float64), keys) / np.sqrt(q.shape[2])
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = np.einsum("hlm,mhd->lhd", powers / powers.sum(axis=-1, keepdims=True), values)
    return attended.reshape(len(q), -1).astype(np.float32)


def byte_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Compute attention over keys and values rounded to 8 bits, as the kernels do with `k8v8`."""
    keys, values = (kv_cache.round_vectors(heads, 8) for heads in (k, v))
    return kv_cache.attention(q, keys, values, 0, 1 / math.sqrt(q.shape[2])).reshape(len(q), -1)


class NumpyModel:
    """The model of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile.open(path)
        self.config = SmolLM3Config.from_metadata(self._file.metadata)
        self._weights = SmolLM3Weights.from_tensors(self._file.tensors, self.config)
        self._frequencies = np.array(self.config.rope_frequencies(self.config.max_position_embeddings)[0])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def logits(self, ids: Sequence[int], matmul: Matmul, attention: Attention = float_attention) -> Floats:
        """Return the logits (L, V) after each of `ids`."""
        return matmul(self.hidden_states(ids, matmul, attention), self._weights.lm_head)

    def hidden_states(self, ids: Sequence[int], matmul: Matmul, attention: Attention = float_attention) -> Floats:
        """Return the hidden states (L, C) of `ids`, after the last norm."""
        config, weights = self.config, self._weights
        x = reference.embedding_rows(weights.embed_tokens, np.array(ids))
        for index, layer in enumerate(weights.layers):
            h = reference.rms_norm(x, layer.input_layernorm, config.rms_norm_eps)
            q, k, v = (
                matmul(h, weight).reshape(len(x), -1, config.head_dim)
                for weight in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            if config.uses_rope(index):
                positions = np.arange(len(x))
                q, k = (reference.rope(heads, positions, self._frequencies) for heads in (q, k))
            x = x + matmul(attention(q, k, v), layer.o_proj)
            h = reference.rms_norm(x, layer.post_attention_layernorm, config.rms_norm_eps)
            gated = reference.silu_mul(matmul(h, layer.gate_proj), matmul(h, layer.up_proj))
            x = x + matmul(gated, layer.down_proj)
        return reference.rms_norm(x, weights.norm, config.rms_norm_eps)
