"""What a program asks of the engine, whichever form of API it speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from notso.smollm3 import AnswerOptions, CompleteOptions, Message, Priority, SamplingParams

Prompt = tuple[Message, ...] | str
"""A conversation, or text to be written on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(CompleteOptions):
    """A request, checked. Every prompt is answered with every one of `params`.

    `fresh`: nothing cached may be used. `keep`: the answer is stored until it is deleted. `model`: the name that was
    given. `names`: what this API calls a field, where a chat completion has another word for it.
    """

    model: str | None = None
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    stream: bool = False
    fresh: bool = False
    keep: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """One for each answer, those to the same prompt beside each other."""
        return ((prompt, params) for prompt in self.prompts for params in self.params)

    def options_for(self, owner: str, priority: Priority = "api", *, conversation: str | None = None) -> AnswerOptions:
        """What the engine is told besides the prompt and the sampling."""
        return {**self.options, "owner": owner, "priority": priority, "conversation": conversation}
