"""Plain completions as the OpenAI API writes them: the older form, whose choices are texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notso.smollm3 import Event, TokenLogprob
from notso.web.api.completions.fields import TextRequest
from notso.web.api.shared.completion import Choice, Completion, new_choice, timings, usage_body
from notso.web.api.shared.serializer import DONE, PING, data_event, progress_body
from notso.web.api.shared.stopwatch import Stopwatch
from notso.web.api.shared.token_logprobs import characters, legacy
from notso.web.edge.api_error import ApiError


class TextSerializer:
    """An Serializer: chunks, exactly one finish for each choice, and [DONE]; or one error in their place."""

    ping = PING

    def __init__(self, asked: TextRequest, completion: Completion) -> None:
        self._asked = asked
        self._completion = completion
        self._weighed = asked.options.top_logprobs is not None
        self._echoed = [text if asked.echo else "" for text in asked.texts for _ in asked.params]
        self._prompts: list[list[TokenLogprob]] = [[] for _ in self._echoed]
        self._choices = [new_choice(logprobs=self._weighed) for _ in self._echoed]
        self._watches = [Stopwatch() for _ in self._choices] if asked.timings_per_token else None
        self.id = completion.id

    def again(self) -> TextSerializer:
        """The same answer from its beginning."""
        return TextSerializer(self._asked, self._completion)

    def initial_events(self) -> Iterator[bytes]:
        """The prompts, for who wants them repeated."""
        for number, echoed in enumerate(self._echoed):
            if echoed:
                yield self._sse_event(number, echoed)

    def take(self, number: int, event: Event) -> Iterator[bytes]:
        """What an event adds to choice `number`. Raises the error of an `error` event."""
        choice = self._choices[number]
        so_far = self._watches[number].take(event) if self._watches is not None else None
        more = {"timings": so_far} if so_far else {}
        if event.kind == "prompt":
            scores = legacy(event.logprobs, characters(self._prompts[number]))
            self._prompts[number] += event.logprobs
            yield self._sse_event(number, "", None, scores)
        written = len(self._echoed[number]) + len(choice.content)
        delta = choice.add(event)
        if delta is not None and "content" in delta:
            logprobs = legacy(event.logprobs, written) if self._weighed else None
            yield self._sse_event(number, delta["content"], None, logprobs, **more)
        elif event.progress is not None and self._asked.return_progress:
            yield self._sse_event(number, "", prompt_progress=progress_body(event.progress))
        if event.kind == "end":
            untold = legacy(event.logprobs, written) if event.logprobs else None
            yield self._sse_event(number, "", choice.reason, untold, timings=timings([choice]))

    async def finalise(self) -> None:
        """Nothing is kept."""

    def closing(self) -> Iterator[bytes]:
        """The counts, for who asked for them, and the end."""
        if self._asked.include_usage:
            yield data_event(self._head() | {"choices": [], "usage": self._usage()})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """The error, in place of all that would have come."""
        return data_event(error.body)

    def body(self) -> dict[str, Any]:
        """The whole."""
        return self._head() | {
            "choices": [self._entry(number, choice) for number, choice in enumerate(self._choices)],
            "usage": self._usage(),
            "timings": timings(self._choices),
        }

    def _entry(self, number: int, choice: Choice) -> dict[str, Any]:
        weighed = choice.content_logprobs
        told = None if weighed is None else legacy([*self._prompts[number], *weighed], 0)
        return {
            "index": number,
            "text": self._echoed[number] + choice.content,
            "logprobs": told,
            "finish_reason": choice.reason,
        }

    def _usage(self) -> dict[str, Any]:
        return usage_body(self._choices, len(self._asked.prompts))

    def _sse_event(self, number: int, text: str, reason: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        entry = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return data_event(self._head() | {"choices": [entry]} | more)

    def _head(self) -> dict[str, Any]:
        return self._completion.head("text_completion")
