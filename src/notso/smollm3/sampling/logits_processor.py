"""Logits processors from plugins, applied per request before the grammar mask, penalties and sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.values.sampling_params import SamplingParams

# Returns new logits. Parameters: the tokens so far, as the bytes of an int32 array (L,), and the logits, as the bytes
# of a float32 array (V,). The function must return in bounded time and raise only NotsoErrors.
RowFunction = Callable[[memoryview, memoryview], bytes]

FindProcessor = Callable[[str], RowFunction | None]


class LogitsProcessors:
    """A request's processors, in order."""

    def __init__(self, functions: Sequence[tuple[str, RowFunction]]) -> None:
        self._functions = functions

    def apply_to(self, logits: Floats, tokens: Sequence[int]) -> Floats:
        """Return the processed logits (V,). Raises the processors' errors, or EngineError if a result is invalid."""
        history = np.asarray(tokens, np.int32).data.cast("B")
        for name, function in self._functions:
            row = np.ascontiguousarray(logits, np.float32)
            result = np.frombuffer(function(history, row.data.cast("B")), np.float32)
            highest = result.max(initial=-np.inf)  # NaN if one of the logits is NaN
            if result.shape != row.shape or not np.isfinite(highest):
                others = "returned NaN, infinity or the wrong number of logits"
                reason = "left no token to choose" if np.isneginf(highest) else others
                raise EngineError(f"the logits processor {name} {reason}")
            logits = result
        return logits


def logits_processors_for(names: Sequence[str], find: FindProcessor | None) -> LogitsProcessors | None:
    """Return the named processors, or None if there are no names. Raises InvalidRequestError."""
    functions = []
    for name in names:
        function = find(name) if find is not None else None
        if function is None:
            raise InvalidRequestError(
                f"there is no logits processor {name!r}; a plugin must provide it", param="logits_processors"
            )
        functions.append((name, function))
    return LogitsProcessors(functions) if functions else None


class AnswerEnd:
    """Masks tokens that end the answer, as `min_tokens` and `ignore_eos` require."""

    def __init__(self, params: SamplingParams, own_ends: Collection[int]) -> None:
        # own_ends: the model's end tokens. With `ignore_eos`, they are always masked, so that the next best token is
        # sampled instead, as in llama.cpp. Until `min_tokens` have been generated, the end tokens and `stop_token_ids`
        # are masked, as in vLLM (MinTokensLogitsProcessor).
        self._min_tokens = params.min_tokens
        self._early = np.array(sorted({*own_ends, *params.stop_token_ids}), np.intp)
        self._late = np.array(sorted(own_ends) if params.ignore_eos else (), np.intp)

    def restrict(self, logits: Floats, generated: int) -> Floats:
        """Return logits (V,) with end tokens masked; the same array if none is masked."""
        masked = self._early if generated < self._min_tokens else self._late
        if not len(masked):
            return logits
        restricted = logits.copy()
        restricted[masked] = -np.inf
        return restricted


def answer_end_for(params: SamplingParams, own_ends: Collection[int]) -> AnswerEnd | None:
    """Return a request's AnswerEnd, or None if none is needed."""
    return AnswerEnd(params, own_ends) if params.min_tokens or params.ignore_eos else None
