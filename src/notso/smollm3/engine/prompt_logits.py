"""Logits after every token of a context, for measurements.

A long context is computed in pieces between engine steps, small ones while answers are running, so that none of them
stalls.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from notso.smollm3.engine.engine_core import EngineCore
from notso.smollm3.errors import EngineError
from notso.smollm3.model.lora import Adapter
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, OutOfBlocksError
from notso.smollm3.scheduling.scheduler import TILE_ROWS
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.scheduling.step_plan import MAX_SAMPLED, Chunk

Floats = npt.NDArray[np.float32]


class ContextLogits:
    """Computes one context at a time from an empty cache. `batch_index`: a spare table row."""

    def __init__(self, core: EngineCore, batch_index: int, vocab_size: int) -> None:
        self._core = core
        self._batch_index = batch_index
        self._vocab_size = vocab_size
        self._turn = threading.Lock()

    def compute(self, tokens: list[int], adapter: Adapter | None = None) -> Floats:
        """Return logits (L, vocab) float32. Raises EngineError without room or at the engine's end."""
        self._core.refuse_own_thread()
        out = np.empty((len(tokens), self._vocab_size), np.float32)
        sequence = Sequence(tokens, adapter=adapter)
        with self._turn:
            sequence.batch_index = self._batch_index
            try:
                self._core.call(lambda: self._take_blocks(sequence))
                at = 0
                while at < len(tokens):
                    at = self._core.call(lambda start=at: self._compute_piece(sequence, start, out))  # type: ignore[misc]
            finally:
                with suppress(EngineError):  # after the engine's end there is nothing to free
                    self._core.call(lambda: self._give_back(sequence))
        return out

    # On the engine's thread

    def _take_blocks(self, sequence: Sequence) -> None:
        pool = self._core.scheduler.pool
        try:
            for _ in range(0, len(sequence.tokens), BLOCK_TOKENS):
                sequence.blocks.append(pool.allocate())
        except OutOfBlocksError:
            raise EngineError("other requests are using the whole cache; try again when they are done") from None

    def _compute_piece(self, sequence: Sequence, start: int, out: Floats) -> int:
        rest = sequence.tokens[start + 1 : start + (TILE_ROWS if self._core.requests else MAX_SAMPLED)]
        pool, count = self._core.scheduler.pool, 1 + len(rest)
        pool.open_windows(sequence.blocks, start, count)
        rows = self._core.runner.run([Chunk(sequence, start, 1, rest, samples=True)], lambda _: True)
        pool.close_windows(sequence.blocks, start, count)
        end = start + count
        out[start:end] = rows[0] if rows else np.nan
        return end

    def _give_back(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self._core.scheduler.pool.free(block)
