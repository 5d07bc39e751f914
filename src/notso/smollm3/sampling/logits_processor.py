"""Processors of logits that others wrote: they change a row before grammar, penalties and sampling, for one request.

A request that names none is computed as if there were none; one that does is what its processors make of the same rows
in the same order, with drafts and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.sampling.sampler import Floats

RowFunction = Callable[[memoryview, memoryview], bytes]
"""From tokens, int32 (L,), and logits, float32 (V,), each as bytes, to logits, float32 (V,). It takes bounded time and
raises NotsoErrors only."""

FindProcessor = Callable[[str], RowFunction | None]
"""The processor of a name, if there is one."""


class LogitsProcessors:
    """Those of one request, in the order in which it names them."""

    def __init__(self, functions: Sequence[tuple[str, RowFunction]]) -> None:
        self._functions = functions

    def change(self, logits: Floats, tokens: Sequence[int]) -> Floats:
        """Logits (V,) behind `tokens`, changed; a copy. Raises EngineError for what is no row of logits, which no later
        step may meet, and what the function raises."""
        history = np.asarray(tokens, np.int32).data.cast("B")
        for name, function in self._functions:
            row = np.ascontiguousarray(logits, np.float32)
            changed = np.frombuffer(function(history, row.data.cast("B")), np.float32)
            is_row = changed.shape == row.shape and not np.isnan(changed).any() and np.isfinite(changed.max())
            if not is_row:
                raise EngineError(f"the logits processor {name} left nothing to choose from, or what is no number")
            logits = changed
        return logits


def logits_processors_for(names: Sequence[str], find: FindProcessor | None) -> LogitsProcessors | None:
    """Those of that name; None for none. Raises InvalidRequestError for a name that nobody has."""
    functions = []
    for name in names:
        function = find(name) if find is not None else None
        if function is None:
            raise InvalidRequestError(
                f"there is no logits processor {name!r}: plugins give them", param="logits_processors"
            )
        functions.append((name, function))
    return LogitsProcessors(functions) if functions else None
