"""Record the trace of an answer: parameters and tokens of each engine request (run).

With a trace, another engine can continue the answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from notso.smollm3 import Event, Replay, SamplingParams, Usage
from notso.web.engine.port import Request
from notso.web.engine.remote.wire_values import from_wire, to_wire
from notso.web.store.protocol import MOST_TRIES, AnswerRun, AnswerTrace, StoredMessage
from notso.web.turns.prompt import continuation_request


def make_replayable(request: Request, generation_id: str | None) -> Request:
    """Return a copy of the request that reports token ids and has a seed, by default derived from `generation_id`."""
    seed = request.params.seed
    if seed is None:
        seed = int.from_bytes(hashlib.sha256((generation_id or "").encode()).digest()[:8]) >> 1
    options = replace(request.options, token_ids=True)
    return replace(request, params=replace(request.params, seed=seed), options=options)


def message_before_run(run: AnswerRun, message: StoredMessage) -> StoredMessage:
    """Return the answer as it was when `run` began."""
    content, reasoning = message.content[: run.content_at], message.reasoning[: run.reasoning_at]
    return replace(message, content=content, reasoning=reasoning, tool_uses=message.tool_uses[: run.calls])


def replay_request(run: AnswerRun, full_request: Request, message: StoredMessage, *, keep_thinking: bool) -> Request:
    """Return the request that continues `run` after its tokens so far.

    `message` is the partial answer to `full_request`.
    """
    request = continuation_request(full_request, message_before_run(run, message), keep_thinking=keep_thinking)
    options = replace(request.options, token_ids=True, replay=Replay(run.ids, run.closed_at, run.origin))
    return replace(request, params=from_wire(SamplingParams, dict(run.params)), options=options)


class TraceRecorder:
    """Records the trace of an answer during its generation.

    `is_counted` is true if `trace.tries` already includes the next try, as for an answer taken over by this process.
    """

    def __init__(self, trace: AnswerTrace, *, is_counted: bool = False) -> None:
        self.trace = trace
        self._is_counted = is_counted

    @property
    def last(self) -> AnswerRun:
        return self.trace.runs[-1]

    @property
    def last_params(self) -> SamplingParams:
        params: SamplingParams = from_wire(SamplingParams, dict(self.last.params))
        return params

    @property
    def last_usage(self) -> Usage:
        return Usage(0, self.last.tokens, self.last.reasoning_tokens)

    @property
    def is_retrying(self) -> bool:
        """Whether the run has been restarted and has no new token yet."""
        return self.trace.tries > 1

    @property
    def is_within_run(self) -> bool:
        """Whether the last run must be sent again, because it did not end with tool calls."""
        return bool(self.trace.runs) and self.last.finish != "tool_calls"

    @property
    def can_continue(self) -> bool:
        """Whether another engine may continue the last run."""
        return self.is_within_run and self.trace.tries < MOST_TRIES

    def begin(self, request: Request, message: StoredMessage, *, hurry: bool, is_apart: bool) -> None:
        """Add the run of `request`, which continues `message`."""
        at = len(message.content), len(message.reasoning), len(message.tool_uses)
        run = AnswerRun(to_wire(request.params), *at, hurry=hurry, is_apart=is_apart)
        tries = int(self._is_counted) if self.trace.runs else self.trace.tries
        self.trace = replace(self.trace, runs=(*self.trace.runs, run), tries=tries)

    def consume(self, event: Event) -> None:
        match event.kind:
            case "started":
                self._change(origin=event.origin, limit=event.limit)
                self.trace = replace(self.trace, tries=self.trace.tries + (not self._is_counted))
                self._is_counted = False
            case "tokens":
                ids = self.last.ids
                closed_at = (*self.last.closed_at, len(ids)) if event.is_forced else self.last.closed_at
                self._change(ids=ids + event.token_ids, closed_at=closed_at)
                self.trace = replace(self.trace, tries=1)
            case "usage" if event.usage is not None:
                self._change(tokens=event.usage.completion_tokens, reasoning_tokens=event.usage.reasoning_tokens)
            case "end" if event.finish_reason not in (None, "cancelled"):
                self._change(finish=event.finish_reason)

    def _change(self, **changes: object) -> None:
        runs = (*self.trace.runs[:-1], replace(self.last, **changes))  # type: ignore[arg-type]
        self.trace = replace(self.trace, runs=runs)
