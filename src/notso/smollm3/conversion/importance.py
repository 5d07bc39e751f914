"""Measure the mean squares of each matrix's input columns on a text (called an importance matrix in llama.cpp).

An error in a weight changes the output by the error times the weight's input. Quantization should therefore minimize
the sum of squared weight errors, each multiplied by the mean square of its input column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from notso.qtensor import CPU, Array, Backend, GGUFFile, RMSNorm, Weight
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.model.transformer import SmolLM3
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.text.tokenizer import Tokenizer

# Number of tokens per window. Each window starts with an empty context; an incomplete last window is ignored.
WINDOW_TOKENS = 512

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]  # number of windows done, total number of windows


@dataclass(frozen=True, slots=True)
class Importance:
    """Mean squares by tensor name, as float32 arrays (columns,)."""

    of: Mapping[str, Floats]
    windows: int


def importance(file: GGUFFile, text: str, threads: int | None, progress: Progress) -> Importance:
    """Measure importance. Raises KernelChoiceError, ModelFileError, or InvalidRequestError if the text is too short."""
    config = SmolLM3Config.from_metadata(file.metadata)
    ids = Tokenizer.from_gguf(file.metadata, file.path).encode(text)
    window = min(WINDOW_TOKENS, config.max_position_embeddings)
    windows = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
    if not windows:
        raise InvalidRequestError(f"the text has {len(ids):,} tokens; at least one window of {window} is required")
    recorder = _RecordingBackend(CPU.configured(threads))
    backend = cast(Backend, recorder)  # its __getattr__ provides the operations that it does not define
    weights = SmolLM3Weights.from_tensors(file.tensors, config).to_device(backend)
    model = SmolLM3(config, weights, KVCache(backend, config, window))
    # Only the inputs of the output head are needed, so its product is not computed.
    recorder.skipped = weights.lm_head
    step = InputBatch(backend, config, window, window)
    all_rows = list(range(window))
    for number, tokens in enumerate(windows):
        step.fill(tokens, all_rows, [0] * window, all_rows)
        model.forward(step)
        progress(number + 1, len(windows))
    means = {name: (sums / recorder.rows[name]).astype(np.float32) for name, sums in recorder.sums.items()}
    return Importance(means, len(windows))


@dataclass
class _RecordingBackend:
    backend: CPU
    sums: dict[str, Doubles] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    skipped: Weight | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def matmul(self, x: Array, weight: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        self._record_inputs(x, [weight], norm)
        if weight is not self.skipped:
            self.backend.matmul(x, weight, out, norm=norm)

    def matmul_many(self, x: Array, products: Sequence[tuple[Weight, Array]], *, norm: RMSNorm | None = None) -> None:
        self._record_inputs(x, [weight for weight, _ in products], norm)
        self.backend.matmul_many(x, products, norm=norm)

    def matmul_add(self, x: Array, weight: Weight, out: Array) -> None:
        self._record_inputs(x, [weight])
        self.backend.matmul_add(x, weight, out)

    def matmul_gated(self, x: Array, gate: Weight, up: Weight, out: Array, *, norm: RMSNorm | None = None) -> None:
        self._record_inputs(x, [gate, up], norm)
        self.backend.matmul_gated(x, gate, up, out, norm=norm)

    def _record_inputs(self, x: Array, weights: Sequence[Weight], norm: RMSNorm | None = None) -> None:
        squares = np.square(self.backend.download(x), dtype=np.float64)
        if norm is not None:
            squares /= squares.mean(axis=1, keepdims=True) + norm.eps
            squares *= np.square(self.backend.download(norm.weight), dtype=np.float64)
        added = squares.sum(axis=0)
        for weight in weights:
            self.sums[weight.name] = self.sums.get(weight.name, 0) + added
            self.rows[weight.name] = self.rows.get(weight.name, 0) + len(squares)
