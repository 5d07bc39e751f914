"""What a program asks of the engine, whichever form of API it speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from notso.smollm3 import Message, Priority, RequestOptions, SamplingParams
from notso.web.api.request_fields.hints import GivenHint

Prompt = tuple[Message, ...] | tuple[int, ...] | str
"""A conversation, or text to be written on, which token ids may spell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request, checked. Every prompt is answered with every one of `params`, by the same `options`.

    `fresh`: nothing cached may be used. `keep`: the answer is stored until it is deleted. `background`: it is
    written without anybody who reads it, and asked for by its id. `model`: the name that was given; `keep_alive_s`:
    how many seconds it stays loaded afterwards, negative: for ever. `names`: what this API calls a field, where a chat
    completion has another word for it. `ignored`: fields that were given and ask for nothing that is done; `hints` are
    those that the table of fields knows as such.
    """

    model: str | None = None
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    options: RequestOptions
    stream: bool = False
    fresh: bool = False
    keep: bool = False
    background: bool = False
    keep_alive_s: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    hints: tuple[GivenHint, ...] = ()

    @property
    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """One for each answer, those to the same prompt beside each other."""
        return ((prompt, params) for prompt in self.prompts for params in self.params)

    def options_for(self, owner: str, priority: Priority = "api", *, conversation: str | None = None) -> RequestOptions:
        """The options, with who asks."""
        return replace(self.options, owner=owner, priority=priority, conversation=conversation)
