"""Execute the steps that the scheduler plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, repeat

import numpy as np
import numpy.typing as npt

from notso.qtensor import Program
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.model.lora import AdaptedRows, Adapter
from notso.smollm3.model.transformer import SmolLM3
from notso.smollm3.model.weight_placement import WeightPlacement
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.scheduling.sequence import MAX_ROWS, MAX_SAMPLED, Chunk

Floats = npt.NDArray[np.float32]

# Steps of up to this many rows are captured (recorded as native programs) and replayed. They are so short that
# interpreter overhead would be noticeable.
CAPTURED_ROWS = MAX_SAMPLED

MAX_CAPTURED_STEPS = 160

# Key of a captured step: number of rows, number of sampled rows, and the adapter that all rows use.
Shape = tuple[int, int, Adapter | None]


class ModelRunner:
    """Runs the model in preallocated memory. Not thread-safe."""

    def __init__(
        self,
        config: SmolLM3Config,
        weights: SmolLM3Weights,
        cache: KVCache,
        placement: WeightPlacement | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.placement = placement
        self._model = SmolLM3(config, weights, cache)
        self._step = InputBatch(cache.backend, config, max_rows, MAX_SAMPLED)
        self._captured: OrderedDict[Shape, tuple[InputBatch, Program]] = OrderedDict()
        self._adapters: set[Adapter] = set()
        self._last: tuple[InputBatch, Sequence[Chunk]] | None = None
        self.has_captured_steps = False

    @property
    def weights(self) -> SmolLM3Weights:
        return self._model.weights

    @weights.setter
    def weights(self, weights: SmolLM3Weights) -> None:
        self._model.weights = weights
        self._captured.clear()  # captured programs refer to the old weights
        self.has_captured_steps = False

    def adopt_migrated(self) -> None:
        migrated = self.placement.adopt(self.weights) if self.placement is not None else None
        if migrated is not None:
            self.weights = migrated

    def run(self, chunks: Sequence[Chunk], go_on: Callable[[int], bool], *, once: bool = False) -> list[Floats] | None:
        """Run a step. Return each chunk's logits (sampled rows, vocab), valid until the next step.

        Unless the step is captured, call `go_on(layer)` before each layer, and return None if the call returns False.
        `once`: neither capture nor replay the step.
        """
        order = sorted(range(len(chunks)), key=lambda number: _adapter_key(chunks[number]))
        if order != list(range(len(chunks))):  # rows of one adapter must be contiguous
            sorted_logits = self.run([chunks[number] for number in order], go_on, once=once)
            if sorted_logits is None:
                return None
            return [sorted_logits[order.index(number)] for number in range(len(chunks))]
        rows = sum(chunk.rows for chunk in chunks)
        counts = [chunk.sampled_rows for chunk in chunks]
        adapted = _adapter_rows(chunks)
        is_lasting = all(each.end - each.begin == rows and each.adapter in self._adapters for each in adapted)
        # Steps with scored prompts are not captured, because their shapes rarely repeat.
        once = once or not is_lasting or any(chunk.scores for chunk in chunks)
        for chunk in chunks:
            self.cache.place(chunk, _batch_index(chunk))
        shape = (rows, sum(counts), adapted[0].adapter if adapted else None)
        step, program = self._captured.get(shape, (None, None)) if not once else (None, None)
        if step is None:
            step = self._step.part(rows, sum(counts))
            step.adapted = adapted
        _fill_batch(step, chunks, counts)
        if program is not None:
            self._captured.move_to_end(shape)
            program.run()
        elif rows <= CAPTURED_ROWS and not once:
            program = self._capture(shape, step)
            if len(self._captured) > MAX_CAPTURED_STEPS:
                self._captured.popitem(last=False)
            program.run()
        elif not self._model.forward(step, go_on):
            return None
        self._last = step, chunks
        logits = self.cache.backend.download(step.logits)
        return [logits[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]

    def hidden_states(self, chunk: Chunk) -> Floats:
        """Return the hidden states (sampled rows, hidden) of a chunk of the latest step, after the final norm."""
        if self._last is None:
            raise ValueError("no step has run")
        step, chunks = self._last
        place = next(place for place, each in enumerate(chunks) if each is chunk)
        end = sum(each.sampled_rows for each in chunks[: place + 1])
        download = self.cache.backend.download
        states: npt.NDArray[np.float64] = download(step.last[end - chunk.sampled_rows : end]).astype(np.float64)
        scale = np.sqrt(np.square(states).mean(axis=-1, keepdims=True) + self._model.config.rms_norm_eps)
        states *= download(self.weights.norm) / scale
        return states.astype(np.float32)

    def capture_next_step(self) -> None:
        # Captures one step per call, but none while weights migrate: adopting a migrated layer would invalidate all
        # captured steps.
        if self.placement is not None and not self.placement.finished.is_set():
            return
        rows = range(1, min(CAPTURED_ROWS, self.max_rows) + 1)
        missing = next((count for count in rows if (count, 1, None) not in self._captured), None)
        if missing is None or len(self._captured) >= MAX_CAPTURED_STEPS:
            self.has_captured_steps = True
            return
        try:
            self._capture((missing, 1, None), self._step.part(missing, 1))
        except BaseException:
            self.has_captured_steps = True  # a failed capture is not retried
            raise

    def add_adapter(self, adapter: Adapter) -> None:
        self._step.allocate_adapter_buffers()
        self._adapters.add(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        self._adapters.discard(adapter)
        for shape in [shape for shape in self._captured if shape[2] is adapter]:
            del self._captured[shape]

    def _capture(self, shape: Shape, step: InputBatch) -> Program:
        program = self.cache.backend.program()
        with program.record():
            self._model.forward(step)
        self._captured[shape] = step, program  # stored when complete, because KeyboardInterrupt may end the capture
        return program


def _adapter_key(chunk: Chunk) -> tuple[str, int]:
    adapter = chunk.sequence.adapter
    return ("", 0) if adapter is None else (adapter.name, id(adapter))


def _adapter_rows(chunks: Sequence[Chunk]) -> tuple[AdaptedRows, ...]:
    found: list[AdaptedRows] = []
    row = sampled = 0
    for adapter, group in groupby(chunks, key=lambda chunk: chunk.sequence.adapter):
        run = list(group)
        begin, first = row, sampled
        row += sum(chunk.rows for chunk in run)
        sampled += sum(chunk.sampled_rows for chunk in run)
        if adapter is not None:
            found.append(AdaptedRows(adapter, begin, row, first, sampled))
    return tuple(found)


def _fill_batch(step: InputBatch, chunks: Sequence[Chunk], counts: Sequence[int]) -> None:
    ends = zip(accumulate(chunk.rows for chunk in chunks), counts, strict=True)
    step.fill(
        token_ids=[token for chunk in chunks for token in chunk.tokens],
        positions=[at for chunk in chunks for at in range(chunk.start, chunk.start + chunk.rows)],
        sequences=[batch_index for chunk in chunks for batch_index in repeat(_batch_index(chunk), chunk.rows)],
        sampled_rows=[row for end, count in ends for row in range(end - count, end)],
    )


def _batch_index(chunk: Chunk) -> int:
    if chunk.sequence.batch_index is None:
        raise ValueError("only running sequences can be part of a step")
    return chunk.sequence.batch_index
