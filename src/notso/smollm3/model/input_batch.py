"""Preallocated arrays for forward steps; a smaller step uses slices of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from notso.qtensor import Array, Backend
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.model.lora import MAX_RANK, AdaptedRows

Numbers = Sequence[int]

SAMPLED = ("sampled_rows", "sampled_positions", "sampled_sequences", "last", "logits")  # arrays of sampled tokens
SHARED = ("backend", "adapted", "inner")  # attributes that `part` does not slice
MOST_INNER = 3  # maximum number of an adapter's A matrices with the same input (those of q, k and v)


class InputBatch:
    """Arrays for a step with `rows` tokens and logits for `sampled` of them."""

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
        # Rows that use an adapter. `allocate_adapter_buffers` allocates the two arrays below.
        self.adapted: tuple[AdaptedRows, ...] = ()
        self.inner: Array | None = None  # concatenated products `A @ x` of several A matrices
        self.up: Array | None = None  # up projection, which is stored only in steps with adapters

    def allocate_adapter_buffers(self) -> None:
        if self.up is None:
            rows = self.x.shape[0]
            self.inner = self.backend.empty(1, rows * MOST_INNER * MAX_RANK).reshape(rows * MOST_INNER * MAX_RANK)
            self.up = self.backend.empty(*self.gated.shape)

    def fill(self, token_ids: Numbers, positions: Numbers, sequences: Numbers, sampled_rows: Numbers) -> None:
        """Set each token's id, position and block table row (`sequences`), and the ascending `sampled_rows`."""
        write = self.backend.write
        write(self.token_ids, token_ids)
        write(self.positions, positions)
        write(self.sequences, sequences)
        write(self.sampled_rows, sampled_rows)
        write(self.sampled_positions, [positions[row] for row in sampled_rows])
        write(self.sampled_sequences, [sequences[row] for row in sampled_rows])

    @property
    def rotations(self) -> tuple[Array, Array]:
        return self.cosine, self.sine

    def part(self, rows: int, sampled: int) -> InputBatch:
        part = InputBatch.__new__(InputBatch)
        for name, value in vars(self).items():
            is_array = name not in SHARED and value is not None
            setattr(part, name, value[: sampled if name in SAMPLED else rows] if is_array else value)
        return part

    def sampled(self) -> InputBatch:
        """Return an InputBatch of the sampled rows. It shares this batch's arrays; its `x` is this batch's `last`."""
        count = self.sampled_rows.shape[0]
        step = self.part(count, count)
        step.positions, step.sequences = self.sampled_positions, self.sampled_sequences
        step.row_numbers = self.sampled_rows
        step.x = self.last
        step.adapted = tuple(rows.sampled() for rows in self.adapted)
        return step
