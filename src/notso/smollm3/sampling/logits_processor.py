"""Logits processors from plugins, applied per request before grammar, penalties and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.sampling.sampler import Floats

# Maps tokens, int32 (L,), and logits, float32 (V,), both as bytes, to new logits, float32 (V,). It must return in
# bounded time and raise only NotsoErrors.
RowFunction = Callable[[memoryview, memoryview], bytes]

FindProcessor = Callable[[str], RowFunction | None]  # returns the processor of a name, or None


class LogitsProcessors:
    """A request's processors, in order."""

    def __init__(self, functions: Sequence[tuple[str, RowFunction]]) -> None:
        self._functions = functions

    def change(self, logits: Floats, tokens: Sequence[int]) -> Floats:
        """Return changed logits (V,). Raises EngineError for an invalid row, and what processors raise."""
        history = np.asarray(tokens, np.int32).data.cast("B")
        for name, function in self._functions:
            row = np.ascontiguousarray(logits, np.float32)
            changed = np.frombuffer(function(history, row.data.cast("B")), np.float32)
            is_row = changed.shape == row.shape and not np.isnan(changed).any() and np.isfinite(changed.max())
            if not is_row:
                raise EngineError(f"the logits processor {name} left no token to choose, or returned NaN")
            logits = changed
        return logits


def logits_processors_for(names: Sequence[str], find: FindProcessor | None) -> LogitsProcessors | None:
    """Return named processors, or None. Raises InvalidRequestError."""
    functions = []
    for name in names:
        function = find(name) if find is not None else None
        if function is None:
            raise InvalidRequestError(
                f"there is no logits processor {name!r}; plugins provide them", param="logits_processors"
            )
        functions.append((name, function))
    return LogitsProcessors(functions) if functions else None
