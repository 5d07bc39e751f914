"""SmolLM3's forward pass, top to bottom as the paper draws it.

x = E[token]; then for each layer x += attention(norm(x)) and x += feed_forward(norm(x)); logits = E norm(x).
What sets it apart: grouped queries (4 heads read the same keys and values), no position encoding in every fourth layer
(NoPE), and the embedding matrix serving again as the output head. Weights are multiplied as the file's blocks.

Shapes: L rows of a step, C hidden, F feed-forward, H query heads, KH key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from notso.qtensor import Array, Backend, RMSNorm
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.weights import LayerWeights, SmolLM3Weights

Numbers = Sequence[int]

SAMPLED = ("sampled_rows", "sampled_positions", "sampled_sequences", "last", "logits")
"""Arrays of a step with a row for each sampled one."""


class InputBatch:
    """The arrays of one forward step of `rows` tokens, of which `sampled` need logits. Made once, used again and again.

    `fill` says of each row its token, where it stands in its sequence, and which row of the cache's block table that
    sequence has; and which rows are sampled.
    """

    def __init__(self, backend: Backend, config: SmolLM3Config, rows: int, sampled: int) -> None:
        def numbers(count: int) -> Array:
            return backend.upload(np.zeros(count, np.int32))

        self.backend = backend
        hidden, kv_heads, dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.token_ids = numbers(rows)
        self.positions = numbers(rows)
        self.sequences = numbers(rows)
        self.sampled_rows = numbers(sampled)
        self.sampled_positions = numbers(sampled)
        self.sampled_sequences = numbers(sampled)
        self.row_numbers = backend.upload(np.arange(rows, dtype=np.int32))
        self.cosine, self.sine = backend.empty(rows, dim // 2), backend.empty(rows, dim // 2)
        self.x = backend.empty(rows, hidden)
        self.q = backend.empty(rows, config.num_attention_heads * dim)
        self.k = backend.empty(rows, kv_heads * dim)
        self.v = backend.empty(rows, kv_heads * dim)
        self.attended = backend.empty(rows, config.num_attention_heads * dim)
        self.gated = backend.empty(rows, config.intermediate_size)
        self.last = backend.empty(sampled, hidden)
        self.logits = backend.empty(sampled, config.vocab_size)

    def fill(self, token_ids: Numbers, positions: Numbers, sequences: Numbers, sampled_rows: Numbers) -> None:
        """(rows,) numbers each, and (sampled,) of rows in rising order."""
        write = self.backend.write
        write(self.token_ids, token_ids)
        write(self.positions, positions)
        write(self.sequences, sequences)
        write(self.sampled_rows, sampled_rows)
        write(self.sampled_positions, [positions[row] for row in sampled_rows])
        write(self.sampled_sequences, [sequences[row] for row in sampled_rows])

    @property
    def rotations(self) -> tuple[Array, Array]:
        """Cosines and sines for the rows' positions, (rows, D/2) each."""
        return self.cosine, self.sine

    def part(self, rows: int, sampled: int) -> InputBatch:
        """A smaller step in the same memory."""
        part = InputBatch.__new__(InputBatch)
        for name, value in vars(self).items():
            is_array = value is not self.backend
            setattr(part, name, value[: sampled if name in SAMPLED else rows] if is_array else value)
        return part

    def sampled(self) -> InputBatch:
        """The sampled rows as a step, in memory of this one: x is `last`. Its numbers are filled with those of this."""
        count = self.sampled_rows.shape[0]
        step = self.part(count, count)
        step.positions, step.sequences, step.row_numbers = (
            self.sampled_positions,
            self.sampled_sequences,
            self.sampled_rows,
        )
        step.x = self.last
        return step


class SmolLM3:
    """The model over one cache, on its backend. `forward` runs eagerly, or is captured inside `Program.record()`."""

    def __init__(self, config: SmolLM3Config, weights: SmolLM3Weights, cache: KVCache) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.backend = cache.backend
        self.scale = config.head_dim**-0.5
        frequencies, self.rope_factor = config.rope_frequencies(cache.capacity_tokens)
        self.rope_frequencies = self.backend.upload(np.array(frequencies))

    def forward(self, step: InputBatch, go_on: Callable[[int], bool] = lambda _: True) -> bool:
        """token_ids at positions -> keys and values in the cache, and step.logits (sampled, V) float32.

        `go_on` is asked before each layer; once it says no, the step is given up half done and the result is False.
        """
        weights, ops = self.weights, self.backend
        ops.embed_rows(weights.embed_tokens, step.token_ids, step.x)
        ops.rope_table(self.rope_frequencies, step.positions, step.rotations, self.rope_factor)
        for index, layer in enumerate(weights.layers[:-1]):
            if not go_on(index):
                return False
            self._attention(index, layer, step, step)
            self._feed_forward(layer, step)
        if not go_on(len(weights.layers) - 1):
            return False
        # Behind the last layer's keys and values nobody needs the other rows.
        sampled = step.sampled()
        self._attention(len(weights.layers) - 1, weights.layers[-1], step, sampled)
        if step.sampled_rows.shape[0]:
            self._feed_forward(weights.layers[-1], sampled)
            ops.matmul(sampled.x, weights.lm_head, step.logits, norm=self._norm(weights.norm))
        return True

    def _attention(self, index: int, layer: LayerWeights, step: InputBatch, sampled: InputBatch) -> None:
        """x += Wo attention(q, k, v), where q, k, v = W norm(x). `sampled`: the rows that need it, all or the sampled;
        keys and values are stored of all."""
        dim, norm, ops = self.config.head_dim, self._norm(layer.input_layernorm), self.backend
        q, k, v = (array.reshape(array.shape[0], array.shape[1] // dim, dim) for array in (sampled.q, step.k, step.v))
        keys_and_values = [(layer.k_proj, step.k), (layer.v_proj, step.v)]
        if sampled is step:
            ops.matmul_many(step.x, [(layer.q_proj, step.q), *keys_and_values], norm=norm)
        else:
            ops.matmul_many(step.x, keys_and_values, norm=norm)
        if self.config.uses_rope(index):  # every fourth layer goes without: NoPE
            # A GGUF file's rows of q and k are permuted so that pairs to rotate lie side by side.
            ops.rope(k, step.row_numbers, step.rotations, adjacent=True)
        cache = self.cache.block_table, self.cache.pools[index]
        windows = self.cache.windows(index)
        ops.store_key_values(k, v, step.positions, step.sequences, *cache, windows)
        if not sampled.positions.shape[0]:
            return
        if sampled is not step:
            ops.gather_rows(step.x, sampled.row_numbers, sampled.x)
            ops.matmul(sampled.x, layer.q_proj, sampled.q, norm=norm)
        if self.config.uses_rope(index):
            ops.rope(q, sampled.row_numbers, step.rotations, adjacent=True)
        attended = sampled.attended.reshape(q.shape)
        ops.attention(q, sampled.positions, sampled.sequences, *cache, self.scale, attended, windows)
        ops.matmul_add(sampled.attended, layer.o_proj, sampled.x)

    def _feed_forward(self, layer: LayerWeights, step: InputBatch) -> None:
        """x += Wdown (silu(Wgate h) * (Wup h)), where h = norm(x)."""
        norm = self._norm(layer.post_attention_layernorm)
        self.backend.matmul_gated(step.x, layer.gate_proj, layer.up_proj, step.gated, norm=norm)
        self.backend.matmul_add(step.gated, layer.down_proj, step.x)

    def _norm(self, weight: Array) -> RMSNorm:
        return RMSNorm(weight, self.config.rms_norm_eps)
