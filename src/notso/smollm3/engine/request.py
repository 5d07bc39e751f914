"""Requests: input, progress and cost."""

from __future__ import annotations

import hashlib
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.output.generation import Generation
from notso.smollm3.output.output_processor import OutputProcessor
from notso.smollm3.sampling.logits_processor import AnswerEnd, LogitsProcessors
from notso.smollm3.sampling.sampler import Floats, Sampler
from notso.smollm3.sampling.structured_output import StructuredOutput
from notso.smollm3.scheduling.ngram_drafter import NgramDrafter
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.values.events import Event, FinishReason, TokenLogprob, Usage
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import Replay


def ids_digest(ids: abc.Sequence[int]) -> str:
    """Return the SHA-256 of token ids as little-endian int32, in hexadecimal."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


class MeanPooling:
    """Embedding of a prompt: the mean of its last-layer hidden states, accumulated step by step."""

    def __init__(self, tokens: int, hidden_size: int) -> None:
        self._tokens = tokens
        self._done = 0
        self._sum = np.zeros(hidden_size, np.float64)

    def consume(self, start: int, states: Floats) -> None:
        """Add the states (rows, hidden) from position `start` on, except those computed again after a preemption."""
        new = states[max(self._done - start, 0) :]
        self._sum += new.sum(axis=0, dtype=np.float64)
        self._done = max(self._done, start + len(states))

    def embedding(self) -> tuple[float, ...]:
        """Return the mean (hidden,) scaled to norm 1. Raises EngineError for non-finite values."""
        mean = self._sum / self._tokens
        length = float(np.linalg.norm(mean))
        if not np.isfinite(length):
            raise EngineError("the model computed an embedding that is not finite")
        return tuple((mean / length if length else mean).astype(np.float32).tolist())


class PromptScorer(Protocol):
    """Receives the logits of a scored prompt."""

    def consume(self, start: int, logits: Floats) -> tuple[TokenLogprob, ...]: ...


@dataclass(eq=False)
class Request:
    """State of one request in the engine."""

    sequence: Sequence
    generation: Generation
    sampler: Sampler
    output: OutputProcessor
    max_tokens: int
    thinking_budget: int | None = None
    end_of_reasoning_ids: tuple[int, ...] = ()  # inserted by the engine to end the reasoning
    # Called when the request starts. None disables speculative decoding.
    create_drafter: Callable[[], NgramDrafter] | None = None
    processors: LogitsProcessors | None = None
    structured_output: StructuredOutput | None = None
    answer_end: AnswerEnd | None = None
    prompt_scorer: PromptScorer | None = None
    pooling: MeanPooling | None = None
    token_logprob: Callable[[Floats | None, int], TokenLogprob] | None = None
    # Takes the answer, and returns the token ids with which the next prompt will begin, or [] if they would not fit.
    next_ids: Callable[[Message], list[int]] | None = None
    initial_events: list[Event] = field(default_factory=list)  # sent before any other event
    reports_ids: bool = False  # whether to send `started` and `tokens` events
    origin: str = ""  # digest of the prompt, the model and the adapter, or ""; see `Event`
    answer_prefix: str | None = None  # the part of the answer that the prompt already contains, if any
    is_plain: bool = False  # treat the answer as plain text, without reasoning
    closed_at: list[int] = field(default_factory=list)  # answer lengths at which the engine ended the reasoning
    replayed_events: list[Event] = field(default_factory=list)
    # Times in `perf_counter` seconds; 0: not reached yet.
    submitted_at: float = 0.0
    started_at: float = 0.0
    prefilled_at: float = 0.0
    progress_sent_at: float = 0.0
    queue_position: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter: NgramDrafter | None = field(init=False, default=None)
    drafter_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.drafter_length = len(self.sequence.tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.sequence.prompt)

    @property
    def cached_tokens(self) -> int:
        # `sequence.cached` may include tokens of a replayed answer.
        return min(self.sequence.cached, self.prompt_tokens)

    @property
    def is_over(self) -> bool:
        return self.output.finish_reason is not None or self.output.tokens >= self.max_tokens

    @property
    def finish_reason(self) -> FinishReason:
        # An answer that could continue counts as cancelled.
        reason = self.output.finish_reason
        return reason or ("length" if self.output.tokens >= self.max_tokens else "cancelled")

    @property
    def remaining_tokens(self) -> int:
        return self.max_tokens - self.output.tokens

    @property
    def must_close_reasoning(self) -> bool:
        if not self.output.in_reasoning:
            return False
        if self.structured_output is not None and self.structured_output.must_end_reasoning(
            self.remaining_tokens, len(self.end_of_reasoning_ids)
        ):
            return True
        budget = self.thinking_budget
        spent = budget is not None and self.output.reasoning_tokens >= budget
        return spent or self.generation.answer_requested

    def sample(self, logits: Floats) -> tuple[int, list[Event]]:
        """Sample a token from logits (V,) and append it; return the token and its events."""
        token = self.choose_token(logits)
        return token, self.consume(token, None if self.token_logprob is None else self.token_logprob(logits, token))

    def choose_token(self, logits: Floats) -> int:
        sequence, structured_output = self.sequence, self.structured_output
        in_reasoning = self.output.in_reasoning
        restricted = logits if self.processors is None else self.processors.apply_to(logits, sequence.tokens)
        if structured_output is not None:
            restricted = structured_output.restrict(restricted, in_reasoning)
        if self.answer_end is not None:
            restricted = self.answer_end.restrict(restricted, self.output.tokens)
        token = self.sampler.sample(restricted, sequence.tokens, len(sequence.tokens))
        remaining = self.remaining_tokens - 1
        while structured_output is not None and not structured_output.permits(token, in_reasoning, remaining):
            restricted = structured_output.narrow(restricted, token, remaining)
            token = self.sampler.sample(restricted, sequence.tokens, len(sequence.tokens))
        return token

    def consume(self, token: int, entry: TokenLogprob | None = None) -> list[Event]:
        """Append a sampled token; return its events."""
        output, structured_output, remaining = self.output, self.structured_output, self.remaining_tokens - 1
        self.sequence.tokens.append(token)
        if structured_output is not None and structured_output.consume(token, output.in_reasoning, remaining):
            output.begin(calls=token == structured_output.call_tag)
        events = list(output.push(token, entry))
        if structured_output is not None and (
            structured_output.is_over or (not remaining and structured_output.is_whole)
        ):
            output.end()
        return events

    def replay(self, replay: Replay) -> None:
        """Append the tokens of an interrupted answer, so that generation continues after them.

        Raises InvalidRequestError if the origin differs, or if the tokens cannot be those of an interrupted answer.
        """
        if replay.origin not in ("", self.origin):
            raise InvalidRequestError(
                "replay: the prompt, model, adapter, KV format or version of the numerical code differs", param="replay"
            )
        reports_ids, self.reports_ids = self.reports_ids, False  # the client already has the replayed ids
        while (at := self.output.tokens) < len(replay.ids):
            if self.is_over:
                raise InvalidRequestError(f"replay: the answer ends after {at} tokens", param="replay")
            if at in replay.closed_at and self.output.in_reasoning:
                self.replayed_events += self.close_reasoning()
                written = self.sequence.tokens[len(self.sequence.prompt) + at :]
                if written != list(replay.ids[at : at + len(written)]):
                    raise InvalidRequestError("replay: the tokens that end the reasoning differ", param="replay")
                continue
            token = replay.ids[at]
            try:
                if self.structured_output is not None:  # called because `permits` also updates the state
                    self.structured_output.permits(token, self.output.in_reasoning, self.remaining_tokens - 1)
                self.replayed_events += self.consume(token)
            except (ValueError, RuntimeError) as error:
                raise InvalidRequestError(f"replay: token {at} is not possible here", param="replay") from error
        if self.output.tokens != len(replay.ids):
            raise InvalidRequestError("replay: some tokens that end the reasoning are missing", param="replay")
        self.reports_ids = reports_ids
        if self.must_close_reasoning and not self.is_over:
            self.replayed_events += self.close_reasoning()

    def first_events(self) -> list[Event]:
        replayed, self.replayed_events = self.replayed_events, []
        if not self.reports_ids:
            return replayed
        return [Event("started", origin=self.origin, limit=self.max_tokens), *replayed]

    def token_event(self, start: int, *, is_forced: bool = False) -> list[Event]:
        """Return a `tokens` event for the tokens from `start` on, if requested."""
        ids = tuple(self.sequence.tokens[start:])
        if not self.reports_ids or not ids:
            return []
        return [Event("tokens", tokens=self.output.tokens, token_ids=ids, is_forced=is_forced)]

    def close_reasoning(self) -> list[Event]:
        events: list[Event] = []
        start = len(self.sequence.tokens)
        self.closed_at.append(self.output.tokens)
        self.output.drop_partial_character()
        for token in self.end_of_reasoning_ids:
            if self.is_over:
                break
            self.sequence.tokens.append(token)
            events += self.output.push(token, None if self.token_logprob is None else self.token_logprob(None, token))
        return [*events, *self.token_event(start, is_forced=True)]

    def record_acceptance(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        if self.drafter is not None:
            self.drafter.record_acceptance(drafted, accepted)
            self.drafter.extend(self.sequence.tokens[self.drafter_length :])
        self.drafter_length = len(self.sequence.tokens)

    def usage(self) -> Usage:
        now = time.perf_counter()
        started_at, prefilled_at = self.started_at or now, self.prefilled_at or now
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output.tokens,
            reasoning_tokens=self.output.reasoning_tokens,
            cached_tokens=self.cached_tokens,
            prompt_ms=1000 * (prefilled_at - started_at),
            completion_ms=1000 * (now - prefilled_at),
            queue_ms=1000 * (started_at - self.submitted_at),
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
