"""Embedding of a prompt: the mean of its last hidden states, normalized."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from notso.smollm3.errors import EngineError


class MeanPooling:
    """Sums the hidden states of a prompt as they are computed, each once."""

    def __init__(self, tokens: int, hidden_size: int) -> None:
        self._tokens = tokens
        self._done = 0
        self._sum = np.zeros(hidden_size, np.float64)

    def take(self, start: int, states: npt.NDArray[np.float32]) -> None:
        """Add states (rows, hidden) of the tokens from `start`, except repeated ones after a preemption."""
        new = states[max(self._done - start, 0) :]
        self._sum += new.sum(axis=0, dtype=np.float64)
        self._done = max(self._done, start + len(states))

    def embedding(self) -> tuple[float, ...]:
        """Return the mean of length 1 (hidden,). Raises EngineError if it is not finite."""
        mean = self._sum / self._tokens
        length = float(np.linalg.norm(mean))
        if not np.isfinite(length):
            raise EngineError("the model computed an embedding that is not finite")
        return tuple((mean / length if length else mean).astype(np.float32).tolist())
