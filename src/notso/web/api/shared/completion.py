"""Build chat completion bodies from events: choices, token counts, timings and log probabilities."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from notso.extras import installed_release
from notso.smollm3 import Event, FinishReason, ModelInfo, TokenLogprob, ToolCall, Usage

IMPOSSIBLE = -9999.0
"""Lowest log probability in responses. It replaces minus infinity, which JSON cannot represent."""
_LARGEST = sys.float_info.max
_SURROGATE = re.compile("[\ud800-\udfff]")


def logprob_entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [logprob_entry(token) | {"top_logprobs": [logprob_entry(other) for other in token.top]} for token in tokens]


def legacy_logprobs(tokens: Iterable[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return log probabilities in the format of text completions. The first token starts at character `offset`."""
    listed: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        # A prompt's first token has no predecessor and thus no probability; the API returns null for it.
        is_first = math.isnan(token.logprob)
        top = {_token_text(other): max(other.logprob, IMPOSSIBLE) for other in token.top}
        listed["tokens"].append(_token_text(token))
        listed["token_logprobs"].append(None if is_first else max(token.logprob, IMPOSSIBLE))
        listed["top_logprobs"].append(None if is_first else top)
        # The offset of a token whose bytes start in the middle of a character is the offset of that character.
        listed["text_offset"].append(offset - (not _count_character_starts(token.bytes[:1])))
        offset += _count_character_starts(token.bytes)
    return listed


def count_characters(tokens: Iterable[TokenLogprob]) -> int:
    return sum(_count_character_starts(token.bytes) for token in tokens)


def _count_character_starts(data: Sequence[int]) -> int:
    # Counts the characters that begin in these bytes. Bytes of the form 10xxxxxx continue a character in UTF-8.
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _token_text(token: TokenLogprob) -> str:
    # As in OpenAI's API, tokens with incomplete characters are written as bytes. As text, different tokens would look
    # the same, because each incomplete character is shown as U+FFFD.
    if "\N{REPLACEMENT CHARACTER}" not in token.text or bytes(token.bytes) == token.text.encode():
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, IMPOSSIBLE), "bytes": list(token.bytes)}


OPEN_REASONING, CLOSE_REASONING = "<think>\n", "\n</think>\n"


@dataclass(slots=True)
class Choice:
    raw_thinking: bool = False  # whether the content includes the reasoning, between tags
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    begun_call: ToolCall | None = None  # the call whose arguments are being streamed, with the part received so far
    usage: Usage | None = None
    finish_reason: FinishReason = "stop"
    ended: bool = False
    hides_reasoning: bool = False
    in_raw_reasoning: bool = False
    content_logprobs: list[TokenLogprob] | None = None  # None if not requested
    reasoning_logprobs: list[TokenLogprob] | None = None
    live_timings: LiveTimings | None = None  # None if not requested

    def add(self, event: Event) -> dict[str, Any] | None:
        """Apply an event; return its delta for the stream, if any. Raises `event.error` if set."""
        match event.kind:
            case "reasoning" if self.hides_reasoning:
                return None
            case "reasoning" if self.raw_thinking:
                piece = event.text if self.in_raw_reasoning else OPEN_REASONING + event.text
                self.in_raw_reasoning = True
                self._collect_logprobs(self.content_logprobs, event)
                return self._append_text(piece)
            case "reasoning":
                self.reasoning += event.text
                self._collect_logprobs(self.reasoning_logprobs, event)
                return {"reasoning_content": event.text}
            case "text":
                self._collect_logprobs(self.content_logprobs, event)
                return self._append_text(self._close_reasoning() + event.text)
            case "tool_call_part" if event.begun_call is not None:
                return self._append_call(event.begun_call, event.text)
            case "tool_call" if event.tool_call is not None:
                streamed = "" if self.begun_call is None else self.begun_call.arguments
                delta = self._append_call(event.tool_call, event.tool_call.arguments[len(streamed) :])
                self.tool_calls.append(event.tool_call)
                self.begun_call = None
                return delta
            case "usage":
                self.usage = event.usage
            case "error" if event.error is not None:
                raise event.error
            case "end":
                self._collect_logprobs(self.content_logprobs, event)
                self.finish_reason = event.finish_reason or "stop"
                self.ended = True
                if self.begun_call is not None:  # the call was cut off: keep the part that was streamed
                    self.tool_calls.append(self.begun_call)
                    self.begun_call = None
                if tail := self._close_reasoning():
                    return self._append_text(tail)
        return None

    def timings_so_far(self, event: Event) -> dict[str, Any]:
        """Return a dict that contains the chunk's field `timings`, or {} if there are no timings."""
        so_far = self.live_timings.feed(event) if self.live_timings is not None else None
        return {} if so_far is None else {"timings": so_far}

    @property
    def reason(self) -> str:
        return "stop" if self.finish_reason == "cancelled" else self.finish_reason

    @property
    def logprobs(self) -> dict[str, Any] | None:
        return logprobs_body(self.content_logprobs, self.reasoning_logprobs)

    def body(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        message["refusal"] = None
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        return {"index": index, "message": message, "logprobs": self.logprobs, "finish_reason": self.reason}

    def _append_call(self, call: ToolCall, text: str) -> dict[str, Any] | None:
        # A call may directly follow raw reasoning. Its delta then also contains the tag that closes the reasoning.
        index, before = len(self.tool_calls), self._close_reasoning()
        if self.begun_call is None:
            self.begun_call = replace(call, arguments=text)
            entry = {"index": index, **_call(self.begun_call)}
        elif text:
            self.begun_call = replace(call, arguments=self.begun_call.arguments + text)
            entry = {"index": index, "function": {"arguments": text}}
        else:
            return None
        return {"tool_calls": [entry]} | (self._append_text(before) if before else {})

    def _collect_logprobs(self, logprobs: list[TokenLogprob] | None, event: Event) -> None:
        if logprobs is not None:
            logprobs += event.logprobs

    def _append_text(self, text: str) -> dict[str, Any]:
        self.content += text
        return {"content": text}

    def _close_reasoning(self) -> str:
        was_open, self.in_raw_reasoning = self.in_raw_reasoning, False
        return CLOSE_REASONING if was_open else ""


def new_choice(
    *, raw_thinking: bool = False, hides_reasoning: bool = False, logprobs: bool = False, live_timings: bool = False
) -> Choice:
    choice = Choice(raw_thinking, hides_reasoning=hides_reasoning, live_timings=LiveTimings() if live_timings else None)
    if logprobs:
        choice.content_logprobs, choice.reasoning_logprobs = [], []
    return choice


def logprobs_body(
    content: Iterable[TokenLogprob] | None, reasoning: Iterable[TokenLogprob] | None
) -> dict[str, Any] | None:
    # Reasoning tokens are listed separately, under vLLM's name `reasoning_content`.
    if content is None:
        return None
    reasoning_entries = logprob_entries(reasoning or ())
    return {"content": logprob_entries(content), "refusal": None} | (
        {"reasoning_content": reasoning_entries} if reasoning_entries else {}
    )


def collect_choice(events: Iterable[Event], **options: bool) -> Choice:
    """Build a choice from all its events. Raises `event.error` if set."""
    choice = new_choice(**options)
    for event in events:
        choice.add(event)
    return choice


@dataclass(frozen=True, slots=True)
class Completion:
    """Fields common to all chunks of a response."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Choice], reasoning_mode: str) -> dict[str, Any]:
        return self.head("chat.completion") | {
            "choices": [choice.body(index) for index, choice in enumerate(choices)],
            "usage": usage_body(choices),
            "timings": timings(choices) | {"reasoning_mode": reasoning_mode},
        }

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def fingerprint(info: ModelInfo) -> str:
    """Return a fingerprint of the release, model file and KV cache format."""
    # Reported as `system_fingerprint`. If it changes, the same request may get a different answer.
    parts = (installed_release(), info.name, info.size_bytes, info.parameter_count, sorted(info.quantization.items()))
    digest = hashlib.sha256(repr((parts, info.kv_format)).encode()).hexdigest()
    return f"fp_{digest[:12]}"


def usage_body(choices: Sequence[Choice], prompts: int = 1) -> dict[str, Any]:
    """Return token counts. Each prompt is counted once, even if several choices share it."""
    usages = list(_usages(choices))
    prompt_usages = list(_usages(choices[:: max(1, len(choices) // prompts)]))
    prompt = sum(usage.prompt_tokens for usage in prompt_usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompt_usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    usage = next(_usages(choices), None)
    if usage is None:
        return {}
    prefilled = usage.prompt_tokens - usage.cached_tokens
    return timings_body(usage.cached_tokens, prefilled, usage.prompt_ms, usage.completion_tokens, usage.completion_ms)


def timings_body(cached: int, prefilled: int, prefill_ms: float, decoded: int, decode_ms: float) -> dict[str, Any]:
    # Prefill already produces the first token, so the decoding rates count one token fewer.
    prefill_ms, decode_ms = round(prefill_ms, 3), round(decode_ms, 3)
    return {
        "cache_n": cached,
        "prompt_n": prefilled,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": _per_token_ms(prefill_ms, prefilled),
        "prompt_per_second": _rate(prefilled, prefill_ms),
        "predicted_n": decoded,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": _per_token_ms(decode_ms, decoded - 1),
        "predicted_per_second": _rate(decoded - 1, decode_ms),
    }


def _usages(choices: Sequence[Choice]) -> Iterator[Usage]:
    return (choice.usage for choice in choices if choice.usage is not None)


def _rate(tokens: int, milliseconds: float) -> float:
    return 1000 * tokens / milliseconds if tokens > 0 and milliseconds > 0 else 0.0


def _per_token_ms(milliseconds: float, tokens: int) -> float:
    return milliseconds / tokens if tokens > 0 else 0.0


def parse_arguments(call: ToolCall) -> Any:
    # Models may write escapes of lone surrogates, or numbers beyond the range of doubles. Response bodies cannot
    # contain either.
    value = json.loads(call.arguments, parse_float=lambda text: max(-_LARGEST, min(_LARGEST, float(text))))
    return json.loads(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(value, ensure_ascii=False)))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class LiveTimings:
    def __init__(self) -> None:
        self._cached = self._prefilled = 0
        self._started_at = self._first_token_at = 0.0

    def feed(self, event: Event) -> dict[str, Any] | None:
        """Return the `timings` up to a progress, reasoning or text event, or None for other events."""
        now = time.monotonic()
        self._started_at = self._started_at or now
        if event.progress is not None:
            self._cached = event.progress.cached_tokens
            self._prefilled = event.progress.done_tokens - self._cached
            return timings_body(self._cached, self._prefilled, 1000 * (now - self._started_at), 0, 0.0)
        if event.kind not in ("reasoning", "text"):
            return None
        self._first_token_at = self._first_token_at or now
        prefill_ms = 1000 * (self._first_token_at - self._started_at)
        decode_ms = 1000 * (now - self._first_token_at)
        return timings_body(self._cached, self._prefilled, prefill_ms, event.tokens, decode_ms)
