"""SmolLM3's forward pass, top to bottom as the paper draws it.

x = E[token]; then for each layer x += attention(norm(x)) and x += feed_forward(norm(x)); logits = E norm(x).
What sets it apart: grouped queries (4 heads read the same keys and values), no position encoding in every fourth layer
(NoPE), and the embedding matrix serving again as the output head. Weights are multiplied as the file's blocks.

Shapes: L rows of a step, C hidden, F feed-forward, H query heads, KH key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from notso.qtensor import ops
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv_cache import KVCache
from notso.smollm3.weights import LayerWeights, SmolLM3Weights

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]


class Step:
    """The arrays of one forward step of `rows` tokens, of which `sampled` need logits. Made once, used again and again.

    The caller fills token_ids, positions and sequences (all (rows,) int32: the token, where it stands in its sequence,
    and which row of the cache's block table that sequence has), and sampled_rows ((sampled,) int32, which rows).
    """

    def __init__(self, config: SmolLM3Config, rows: int, sampled: int) -> None:
        hidden, kv_heads, dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.token_ids = np.zeros(rows, np.int32)
        self.positions = np.zeros(rows, np.int32)
        self.sequences = np.zeros(rows, np.int32)
        self.sampled_rows = np.zeros(sampled, np.int32)
        self.row_numbers = np.arange(rows, dtype=np.int32)
        self.cosine, self.sine = ops.empty(rows, dim // 2), ops.empty(rows, dim // 2)
        self.x = ops.empty(rows, hidden)
        self.q = ops.empty(rows, config.num_attention_heads * dim)
        self.k = ops.empty(rows, kv_heads * dim)
        self.v = ops.empty(rows, kv_heads * dim)
        self.attended = ops.empty(rows, config.num_attention_heads * dim)
        self.gated = ops.empty(rows, config.intermediate_size)
        self.last = ops.empty(sampled, hidden)
        self.logits = ops.empty(sampled, config.vocab_size)

    @property
    def rotations(self) -> tuple[Floats, Floats]:
        """Cosines and sines for the rows' positions, (rows, D/2) each."""
        return self.cosine, self.sine

    def part(self, rows: int, sampled: int) -> Step:
        """A smaller step in the same memory."""
        part = Step.__new__(Step)
        for name, array in vars(self).items():
            setattr(part, name, array[: sampled if name in ("sampled_rows", "last", "logits") else rows])
        return part


class SmolLM3:
    """The model over one cache. `forward` runs eagerly, or is recorded when called inside `Program.record()`."""

    def __init__(self, config: SmolLM3Config, weights: SmolLM3Weights, cache: KVCache) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.scale = config.head_dim**-0.5
        frequencies, self.rope_factor = config.rope_frequencies(cache.capacity_tokens)
        self.rope_frequencies = np.array(frequencies)

    def forward(self, step: Step, go_on: Callable[[int], bool] = lambda _: True) -> bool:
        """token_ids at positions -> keys and values in the cache, and step.logits (sampled, V) float32.

        `go_on` is asked before each layer; once it says no, the step is given up half done and the result is False.
        """
        weights = self.weights
        ops.embed_rows(weights.embed_tokens, step.token_ids, step.x)
        ops.rope_table(self.rope_frequencies, step.positions, step.rotations, self.rope_factor)
        for index, layer in enumerate(weights.layers):
            if not go_on(index):
                return False
            self._attention(index, layer, step)
            self._feed_forward(layer, step)
        if step.sampled_rows.size:
            ops.gather_rows(step.x, step.sampled_rows, step.last)
            ops.matmul(step.last, weights.lm_head, step.logits, norm=self._norm(weights.norm))
        return True

    def _attention(self, index: int, layer: LayerWeights, step: Step) -> None:
        """x += Wo attention(q, k, v), where q, k, v = W norm(x)."""
        rows, dim, cache = step.positions.size, self.config.head_dim, self.cache
        q = step.q.reshape(rows, -1, dim)
        k, v = step.k.reshape(rows, -1, dim), step.v.reshape(rows, -1, dim)
        projections = [(layer.q_proj, step.q), (layer.k_proj, step.k), (layer.v_proj, step.v)]
        ops.matmul_many(step.x, projections, norm=self._norm(layer.attn_norm))
        if self.config.uses_rope(index):  # every fourth layer goes without: NoPE
            # A GGUF file's rows of q and k are permuted so that pairs to rotate lie side by side.
            ops.rope(q, step.row_numbers, step.rotations, adjacent=True)
            ops.rope(k, step.row_numbers, step.rotations, adjacent=True)
        places, pool, recent = (
            (step.positions, step.sequences, cache.block_table),
            cache.pools[index],
            cache.recent(index),
        )
        ops.store_key_values(k, v, *places, pool, recent)
        ops.attention(q, *places, pool, self.scale, step.attended.reshape(rows, -1, dim), recent)
        ops.matmul_add(step.attended, layer.o_proj, step.x)

    def _feed_forward(self, layer: LayerWeights, step: Step) -> None:
        """x += Wdown (silu(Wgate h) * (Wup h)), where h = norm(x)."""
        ops.matmul_gated(step.x, layer.gate_proj, layer.up_proj, step.gated, norm=self._norm(layer.ffn_norm))
        ops.matmul_add(step.gated, layer.down_proj, step.x)

    def _norm(self, weight: Floats) -> ops.RMSNorm:
        return ops.RMSNorm(weight, self.config.rms_norm_eps)
