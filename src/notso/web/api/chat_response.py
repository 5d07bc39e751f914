"""The events of answers become the body, or the stream's chunks, of a chat completion."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from notso.smollm3 import Event, FinishReason, ModelInfo, ToolCall, Usage

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>\n", "\n</think>\n"


@dataclass(slots=True)
class Choice:
    """One answer, as collected from its events. `raw_thinking` puts the thoughts into the content, within tags."""

    raw_thinking: bool = False
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason = "stop"
    ended: bool = False
    thinking_aloud: bool = False

    def add(self, event: Event) -> dict[str, Any] | None:
        """Take an event in; what a stream has to say about it (`delta`), if anything. Raises the error of an `error`
        event."""
        match event.kind:
            case "reasoning" if self.raw_thinking:
                piece = event.text if self.thinking_aloud else OPEN_THOUGHT + event.text
                self.thinking_aloud = True
                return self._say(piece)
            case "reasoning":
                self.reasoning += event.text
                return {"reasoning_content": event.text}
            case "text":
                return self._say(self._end_of_thought() + event.text)
            case "tool_call" if event.tool_call is not None:
                before = self._end_of_thought()
                self.tool_calls.append(event.tool_call)
                delta = {"tool_calls": [{"index": len(self.tool_calls) - 1, **_call(event.tool_call)}]}
                return delta | (self._say(before) if before else {})
            case "usage":
                self.usage = event.usage
            case "error" if event.error is not None:
                raise event.error
            case "end":
                self.finish_reason = event.finish_reason or "stop"
                self.ended = True
                if tail := self._end_of_thought():
                    return self._say(tail)
        return None

    @property
    def reason(self) -> str:
        """Why it ended, as the API says it."""
        if self.tool_calls and self.finish_reason == "stop":
            return "tool_calls"
        return "stop" if self.finish_reason == "cancelled" else self.finish_reason

    def body(self, index: int) -> dict[str, Any]:
        """An entry of `choices`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        return {"index": index, "message": message, "logprobs": None, "finish_reason": self.reason}

    def _say(self, text: str) -> dict[str, Any]:
        self.content += text
        return {"content": text}

    def _end_of_thought(self) -> str:
        was, self.thinking_aloud = self.thinking_aloud, False
        return CLOSE_THOUGHT if was else ""


def collect(events: Iterable[Event], *, raw_thinking: bool = False) -> Choice:
    """A whole answer. Raises the error of an `error` event."""
    choice = Choice(raw_thinking)
    for event in events:
        choice.add(event)
    return choice


@dataclass(frozen=True, slots=True)
class Completion:
    """What all parts of one response say about it."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole response."""
        return self._head("chat.completion") | {
            "choices": [choice.body(index) for index, choice in enumerate(choices)],
            "usage": usage_body(choices),
            "timings": timings(choices),
        }

    def chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        """One chunk of a stream, as JSON."""
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _json(self._head("chat.completion.chunk") | {"choices": [entry]} | more)

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        """The last chunk, for who asked for it."""
        return _json(self._head("chat.completion.chunk") | {"choices": [], "usage": usage_body(choices)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def model_id(info: ModelInfo) -> str:
    """The model's name as the API has it: in lower case, without blanks."""
    return "-".join(info.name.lower().split())


@lru_cache(maxsize=8)
def _release() -> str:
    try:
        return version("notso-smollm3-bot")
    except PackageNotFoundError:
        return "unknown"


def fingerprint(info: ModelInfo) -> str:
    """Changes with whatever may change an answer: the release, the file, the cache's format."""
    parts = (_release(), info.name, info.size_bytes, info.parameter_count, sorted(info.quantisation.items()))
    digest = hashlib.sha256(repr((parts, info.kv_format)).encode()).hexdigest()
    return f"fp_{digest[:12]}"


def usage_body(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens; the prompt, which all choices share, counts once."""
    known = list(_usages(choices))
    prompt = known[0].prompt_tokens if known else 0
    written = sum(usage.completion_tokens for usage in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": known[0].cached_tokens if known else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in known)},
    }


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    """Of the first choice: tokens and milliseconds of reading and writing, under llama-server's names."""
    usage = next(_usages(choices), None)
    if usage is None:
        return {}
    read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(usage.prompt_ms, 3),
        "prompt_per_second": _rate(read, usage.prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(usage.completion_ms, 3),
        "predicted_per_second": _rate(usage.completion_tokens, usage.completion_ms),
    }


def _usages(choices: Sequence[Choice]) -> Iterator[Usage]:
    return (choice.usage for choice in choices if choice.usage is not None)


def _rate(tokens: int, milliseconds: float) -> float | None:
    return round(1000 * tokens / milliseconds, 3) if milliseconds > 0 else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
