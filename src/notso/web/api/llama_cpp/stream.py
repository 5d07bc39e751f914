"""Completions as llama.cpp's server writes them: an object, or a list where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notso.smollm3 import Event, ModelInfo, SamplingParams, TokenLogprob
from notso.web.api.llama_cpp.request import NativeRequest
from notso.web.api.shared.completion import Choice, new_choice, new_id, timings
from notso.web.api.shared.generation_settings import generation_settings
from notso.web.api.shared.serializer import PING, data_event, progress_body
from notso.web.api.shared.stopwatch import Stopwatch
from notso.web.api.shared.token_logprobs import entry_of
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import model_id

NO_SLOT = -1
"""Of `id_slot`: an answer has no place of its own."""


class NativeSerializer:
    """A Serializer: pieces with their tokens, then for each choice one event with all that is known of it; or one error
    in their place. Nothing says that the stream ends: `stop` has said so of each choice."""

    ping = PING

    def __init__(self, asked: NativeRequest, info: ModelInfo) -> None:
        self._asked = asked
        self._info = info
        self._params = [params for _ in asked.prompts for params in asked.params]
        self._choices = [new_choice(logprobs=True) for _ in self._params]
        self._stopped_by: list[str | None] = [None for _ in self._params]
        self._watches = [Stopwatch() for _ in self._params] if asked.timings_per_token else None
        self.id = new_id("cmpl")

    def again(self) -> NativeSerializer:
        """The same answer from its beginning."""
        other = NativeSerializer(self._asked, self._info)
        other.id = self.id
        return other

    def initial_events(self) -> Iterator[bytes]:
        """None."""
        yield from ()

    def take(self, number: int, event: Event) -> Iterator[bytes]:
        """What an event adds to choice `number`. Raises the error of an `error` event."""
        choice = self._choices[number]
        so_far = self._watches[number].take(event) if self._watches is not None else None
        more: dict[str, Any] = {"timings": so_far} if so_far else {}
        delta = choice.add(event)
        if delta is not None and "content" in delta:
            if self._asked.n_probs:
                more["completion_probabilities"] = _probabilities(event.logprobs)
            yield self._piece(number, delta["content"], [each.id for each in event.logprobs], **more)
        elif event.progress is not None and self._asked.return_progress:
            yield self._piece(number, "", [], prompt_progress=progress_body(event.progress), **more)
        if event.kind == "end":
            self._stopped_by[number] = event.stop
            yield data_event(self._final(number) | {"content": "", "tokens": []})

    async def finalise(self) -> None:
        """Nothing is kept."""

    def closing(self) -> Iterator[bytes]:
        """None."""
        yield from ()

    def failure(self, error: ApiError) -> bytes:
        """The error, in place of all that would have come."""
        return data_event(error.body)

    def body(self) -> Any:
        """The whole: an object, or a list of them."""
        whole = [self._chosen(self._final(number)) for number in range(len(self._choices))]
        return whole if self._asked.is_list else whole[0]

    def _piece(self, number: int, content: str, tokens: list[int], **more: Any) -> bytes:
        written = len(self._choices[number].content_logprobs or ())
        return data_event(
            {
                "index": number,
                "content": content,
                "tokens": tokens,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": written,
            }
            | more
        )

    def _final(self, number: int) -> dict[str, Any]:
        choice, params = self._choices[number], self._params[number]
        usage, entries = choice.usage, choice.content_logprobs or []
        read, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        was_cut = choice.finish_reason == "length"
        body = {
            "index": number,
            "content": choice.content,
            "tokens": [each.id for each in entries] if self._asked.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": model_id(self._info),
            "tokens_predicted": written,
            "tokens_evaluated": read,
            "tokens_cached": usage.cached_tokens if usage else 0,
            "generation_settings": self._settings(params),
            "prompt": self._asked.texts[number // len(self._asked.params)],
            "has_new_line": "\n" in choice.content,
            "truncated": was_cut and read + written >= self._info.context_tokens,
            "stop_type": self._stop_type(choice, self._stopped_by[number]),
            "stopping_word": self._stopped_by[number] or "",
            "timings": timings([choice]),
        }
        return body | ({"completion_probabilities": _probabilities(entries)} if self._asked.n_probs else {})

    def _settings(self, params: SamplingParams) -> dict[str, Any]:
        asked = self._asked
        return generation_settings(params) | {
            "n_predict": asked.n_predict,
            "max_tokens": asked.n_predict,
            "n_probs": asked.n_probs,
            "stream": asked.stream,
            "timings_per_token": asked.timings_per_token,
            "n_ctx": self._info.context_tokens,
            "model": model_id(self._info),
        }

    def _stop_type(self, choice: Choice, word: str | None) -> str:
        if word is not None:
            return "word"
        return {"length": "limit", "cancelled": "none"}.get(choice.finish_reason, "eos")

    def _chosen(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of the answer what was asked for; a name with a slash is that of something within."""
        if not self._asked.response_fields:
            return body
        found: dict[str, Any] = {}
        for name in self._asked.response_fields:
            value: Any = body
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found


def _probabilities(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.id} | entry_of(token)
