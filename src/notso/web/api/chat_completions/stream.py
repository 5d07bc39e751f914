"""OpenAI's response format for chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notso.smollm3 import Event
from notso.web.api.chat_completions.fields import ChatRequest
from notso.web.api.shared.completion import Completion, Stopwatch, logprobs_body, new_choice, timings
from notso.web.api.shared.serializer import DONE, PING, data_event, progress_body
from notso.web.edge.api_error import ApiError


class ChatSerializer:
    """Serializer for chunks, with one finish per choice, and [DONE]."""

    ping = PING

    def __init__(self, asked: ChatRequest, completion: Completion) -> None:
        self._asked = asked
        self._completion = completion
        self._weighed = asked.options.top_logprobs is not None
        self._choices = [
            new_choice(raw_thinking=asked.raw_thinking, logprobs=self._weighed) for _ in range(len(list(asked.choices)))
        ]
        self._watches = [Stopwatch() for _ in self._choices] if asked.timings_per_token else None
        self.id = completion.id

    def again(self) -> ChatSerializer:
        return ChatSerializer(self._asked, self._completion)

    def initial_events(self) -> Iterator[bytes]:
        """Yield the role of each choice."""
        for number in range(len(self._choices)):
            yield data_event(self._chunk(number, {"role": "assistant", "content": "", "refusal": None}))

    def take(self, number: int, event: Event) -> Iterator[bytes]:
        choice, chunk = self._choices[number], self._chunk
        so_far = self._watches[number].take(event) if self._watches is not None else None
        more = {"timings": so_far} if so_far else {}
        delta = choice.add(event)
        if delta is not None:
            yield data_event(chunk(number, delta, None, self._logprobs(event), **more))
        elif event.progress is not None and self._asked.return_progress:
            yield data_event(chunk(number, {}, prompt_progress=progress_body(event.progress)))
        if event.kind == "end":
            report = timings([choice]) | {"reasoning_mode": self._asked.reasoning_mode}
            untold = logprobs_body(event.logprobs, ()) if event.logprobs else None
            yield data_event(chunk(number, {}, choice.reason, untold, timings=report))

    async def finalise(self) -> None: ...

    def closing(self) -> Iterator[bytes]:
        if self._asked.include_usage:
            yield data_event(self._completion.usage_chunk(self._choices))
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return data_event(error.body)

    def body(self) -> dict[str, Any]:
        return self._completion.body(self._choices, self._asked.reasoning_mode)

    def _chunk(
        self, number: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, **more: Any
    ) -> dict[str, Any]:
        # As in OpenAI's streams, usage is null until the last chunk where it was asked for.
        unknown = {"usage": None} if self._asked.include_usage else {}
        return self._completion.chunk(number, delta, reason, logprobs, **unknown, **more)

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if not self._weighed or event.kind not in ("reasoning", "text"):
            return None
        is_reasoning = event.kind == "reasoning" and not self._asked.raw_thinking
        return logprobs_body(() if is_reasoning else event.logprobs, event.logprobs if is_reasoning else ())
