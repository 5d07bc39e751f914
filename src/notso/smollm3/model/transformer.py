"""SmolLM3's forward pass.

x = E[token]; for each layer x += attention(norm(x)) and x += feed_forward(norm(x)); logits = E norm(x). Specific to
SmolLM3: grouped-query attention (4 query heads share a KV head), no position encoding in every fourth layer (NoPE), and
an output head tied to the embedding. Weights stay in the file's block formats.

Shapes: L rows of a step, C hidden, F feed-forward, H query heads, KH KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from notso.qtensor import Array, RMSNorm
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.model.weights import LayerWeights, SmolLM3Weights


class SmolLM3:
    """The model with its KV cache; `forward` can be recorded as a Program."""

    def __init__(self, config: SmolLM3Config, weights: SmolLM3Weights, cache: KVCache) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.backend = cache.backend
        self.scale = config.head_dim**-0.5
        frequencies, self.rope_factor = config.rope_frequencies(cache.capacity_tokens)
        self.rope_frequencies = self.backend.upload(np.array(frequencies))

    def forward(self, step: InputBatch, go_on: Callable[[int], bool] = lambda _: True) -> bool:
        """Run a step: fill the cache and step.logits (sampled, V) float32.

        `go_on(layer)` is called before each layer. If it returns False, abandon the step and return False.
        """
        weights, ops = self.weights, self.backend
        ops.embed_rows(weights.embed_tokens, step.token_ids, step.x)
        ops.rope_table(self.rope_frequencies, step.positions, step.rotations, self.rope_factor)
        for index, layer in enumerate(weights.layers[:-1]):
            if not go_on(index):
                return False
            self._attention(index, layer, step, step)
            self._feed_forward(index, layer, step)
        if not go_on(len(weights.layers) - 1):
            return False
        # After the last layer's keys and values are stored, only the sampled rows are needed.
        sampled = step.sampled()
        self._attention(len(weights.layers) - 1, weights.layers[-1], step, sampled)
        if step.sampled_rows.shape[0]:
            self._feed_forward(len(weights.layers) - 1, weights.layers[-1], sampled)
            ops.matmul(sampled.x, weights.lm_head, step.logits, norm=RMSNorm(weights.norm, self.config.rms_norm_eps))
        return True

    def _attention(self, index: int, layer: LayerWeights, step: InputBatch, sampled: InputBatch) -> None:
        # x += Wo attention(q, k, v), where q, k, v = W norm(x). Keys and values are stored for all rows; everything
        # else is computed for `sampled` only.
        dim, ops = self.config.head_dim, self.backend
        norm = RMSNorm(layer.input_layernorm, self.config.rms_norm_eps)
        q, k, v = (array.reshape(array.shape[0], array.shape[1] // dim, dim) for array in (sampled.q, step.k, step.v))
        keys_and_values = [(layer.k_proj, step.k), (layer.v_proj, step.v)]
        if sampled is step:
            ops.matmul_many(step.x, [(layer.q_proj, step.q), *keys_and_values], norm=norm)
            self._adapt(index, step, step.x, {"q_proj": step.q, "k_proj": step.k, "v_proj": step.v}, norm)
        else:
            ops.matmul_many(step.x, keys_and_values, norm=norm)
            self._adapt(index, step, step.x, {"k_proj": step.k, "v_proj": step.v}, norm)
        if self.config.uses_rope(index):  # every fourth layer has no position encoding (NoPE)
            # In a GGUF file, the rows of q and k are permuted so that the pairs to rotate are adjacent.
            ops.rope(k, step.row_numbers, step.rotations, adjacent=True)
        cache = self.cache.block_table, self.cache.pools[index]
        windows = self.cache.windows(index)
        ops.store_key_values(k, v, step.positions, step.sequences, *cache, windows)
        if not sampled.positions.shape[0]:
            return
        if sampled is not step:
            ops.gather_rows(step.x, sampled.row_numbers, sampled.x)
            ops.matmul(sampled.x, layer.q_proj, sampled.q, norm=norm)
            self._adapt(index, sampled, sampled.x, {"q_proj": sampled.q}, norm)
        if self.config.uses_rope(index):
            ops.rope(q, sampled.row_numbers, step.rotations, adjacent=True)
        attended = sampled.attended.reshape(q.shape)
        ops.attention(q, sampled.positions, sampled.sequences, *cache, self.scale, attended, windows)
        ops.matmul_add(sampled.attended, layer.o_proj, sampled.x)
        self._adapt(index, sampled, sampled.attended, {"o_proj": sampled.x})

    def _feed_forward(self, index: int, layer: LayerWeights, step: InputBatch) -> None:
        # x += Wdown (silu(Wgate h) * (Wup h)), where h = norm(x).
        norm, ops = RMSNorm(layer.post_attention_layernorm, self.config.rms_norm_eps), self.backend
        if step.adapted:  # unfused operations, with bit-identical results, so that adapters are applied before silu
            ops.matmul_many(step.x, [(layer.gate_proj, step.gated), (layer.up_proj, step.up)], norm=norm)
            self._adapt(index, step, step.x, {"gate_proj": step.gated, "up_proj": step.up}, norm)
            ops.silu_mul(step.gated, step.up, step.gated)
        else:
            ops.matmul_gated(step.x, layer.gate_proj, layer.up_proj, step.gated, norm=norm)
        ops.matmul_add(step.gated, layer.down_proj, step.x)
        self._adapt(index, step, step.gated, {"down_proj": step.x})

    def _adapt(
        self, index: int, step: InputBatch, x: Array, outs: Mapping[str, Array], norm: RMSNorm | None = None
    ) -> None:
        # out += B (A x).
        for rows in step.adapted:
            pairs = [(pair, outs[role]) for role, pair in rows.adapter.layers[index].items() if role in outs]
            begin, end = rows.begin, rows.end
            if not pairs or begin == end:
                continue
            inner, at = [], 0
            for pair, _ in pairs:
                rank, count = pair.rank, end - begin
                inner.append(step.inner[at : at + count * rank].reshape(count, rank))  # type: ignore[index]
                at += count * rank
            products = [(pair.a, to) for (pair, _), to in zip(pairs, inner, strict=True)]
            self.backend.matmul_many(x[begin:end], products, norm=norm)
            for (pair, out), low in zip(pairs, inner, strict=True):
                self.backend.matmul_add(low, pair.b, out[begin:end])
