"""Ollama's response format: lines of JSON ending with a `done` line, or one object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from notso.smollm3 import Event, Message, ToolCall
from notso.web.api.ollama.fields import OllamaRequest, context_of
from notso.web.api.shared.completion import Choice, entries, new_choice, new_id
from notso.web.api.shared.serializer import as_json
from notso.web.edge.api_error import ApiError

Kind = Literal["chat", "generate"]
NANOSECONDS = 1_000_000  # in a millisecond
MEDIA_TYPE = "application/x-ndjson"


class OllamaSerializer:
    """Serializer for Ollama's format."""

    def __init__(self, asked: OllamaRequest, kind: Kind, model: str) -> None:
        self._asked = asked
        self._kind = kind
        self._model = model
        self._created = timestamp(datetime.now(UTC))
        self._choice = new_choice(logprobs=asked.options.top_logprobs is not None)
        self._untold: dict[str, Any] = {}
        self.id = new_id("ollama")
        self.ping = self._line(self._piece())  # JSON lines have no comments: an empty piece serves as ping

    def again(self) -> OllamaSerializer:
        again = OllamaSerializer(self._asked, self._kind, self._model)
        again.id, again._created, again.ping = self.id, self._created, self.ping
        return again

    def initial_events(self) -> Iterator[bytes]:
        return iter(())

    def take(self, number: int, event: Event) -> Iterator[bytes]:
        self._choice.add(event)
        weighed = {"logprobs": entries(event.logprobs)} if event.logprobs else {}
        match event.kind:
            case "end":
                self._untold = weighed
            case "text":
                yield self._line(self._piece(text=event.text) | weighed)
            case "reasoning":
                yield self._line(self._piece(thinking=event.text) | weighed)
            case "tool_call" if event.tool_call is not None:
                yield self._line(self._piece(calls=[_call(len(self._choice.tool_calls) - 1, event.tool_call)]))

    async def finalise(self) -> None: ...

    def closing(self) -> Iterator[bytes]:
        # Counts, and log probabilities of tokens without visible text.
        yield self._line(self._piece() | self._untold | self._end())

    def failure(self, error: ApiError) -> bytes:
        return self._line(error.ollama_body)

    def body(self) -> dict[str, Any]:
        choice = self._choice
        calls = [_call(index, call) for index, call in enumerate(choice.tool_calls)]
        weighed = [*(choice.reasoning_logprobs or ()), *(choice.content_logprobs or ())]
        whole = self._piece(text=choice.content, thinking=choice.reasoning, calls=calls)
        return whole | ({"logprobs": entries(weighed)} if weighed else {}) | self._end()

    def loaded(self) -> dict[str, Any]:
        """Return the response to a load request."""
        return self._piece() | {"done": True, "done_reason": "load"}

    def unloaded(self) -> dict[str, Any]:
        """Return the response to an unload request."""
        return self._piece() | {"done": True, "done_reason": "unload"}

    def _piece(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        beside = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        if self._kind == "generate":
            said: dict[str, Any] = {"response": text, **beside}
        else:
            said = {"message": {"role": "assistant", "content": text, **beside}}
        return {"model": self._model, "created_at": self._created, **said, "done": False}

    def _end(self) -> dict[str, Any]:
        return {"done": True, "done_reason": _reason(self._choice), **self._context()} | _counts(self._choice)

    def _context(self) -> dict[str, Any]:
        prompt = self._asked.prompts[0]
        if not self._asked.gives_context or isinstance(prompt, str):
            return {}
        said = [each for each in prompt if isinstance(each, Message)]
        return {"context": context_of([*said, Message("assistant", self._choice.content)])}

    @staticmethod
    def _line(value: dict[str, Any]) -> bytes:
        return as_json(value).encode() + b"\n"


def timestamp(moment: datetime) -> str:
    """Format a UTC time as Go does."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _reason(choice: Choice) -> str:
    # Ollama has no reason for answers that end with tool calls.
    return "length" if choice.finish_reason == "length" else "stop"


def _counts(choice: Choice) -> dict[str, int]:
    # Token counts and nanoseconds; loading time is not counted.
    usage = choice.usage
    if usage is None:
        return {}
    return {
        "total_duration": _nanoseconds(usage.queue_ms + usage.prompt_ms + usage.completion_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(usage.prompt_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(usage.completion_ms),
    }


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * NANOSECONDS)


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}}
