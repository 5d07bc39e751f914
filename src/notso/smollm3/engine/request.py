"""One answer on its way through the engine: what was asked, how far it is, and what it has cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from notso.smollm3.output.generation import Generation
from notso.smollm3.output.logprobs import PromptScores
from notso.smollm3.output.output_processor import OutputProcessor
from notso.smollm3.sampling.answer_end import AnswerEnd
from notso.smollm3.sampling.logits_processor import LogitsProcessors
from notso.smollm3.sampling.sampler import Floats, Sampler
from notso.smollm3.sampling.structured_output import StructuredOutput
from notso.smollm3.scheduling.ngram_drafter import NgramDrafter
from notso.smollm3.scheduling.sequence import Sequence
from notso.smollm3.values.events import Event, TokenLogprob, Usage
from notso.smollm3.values.messages import Message


@dataclass(eq=False)
class Request:
    """One answer on its way. `most`: of its tokens; `thinking_budget`: of those that think; `closing`: tokens that
    end a thought for the model; `propose`: makes the drafter of what comes next, once the answer is under way
    (None: nobody does); `processors`: what changes logits first; `structured_output`: what keeps the answer to a
    grammar; `answer_end`: what keeps it from ending; `scores`: makes the prompt's log probabilities, `describe` a
    token's; `next_ids`: writes what the next turn's prompt begins with, given the answer (empty: of no use). Times in
    seconds of `perf_counter`, 0 until they come."""

    sequence: Sequence
    generation: Generation
    sampler: Sampler
    output: OutputProcessor
    most: int
    thinking_budget: int | None = None
    closing: tuple[int, ...] = ()
    propose: Callable[[], NgramDrafter] | None = None
    processors: LogitsProcessors | None = None
    structured_output: StructuredOutput | None = None
    answer_end: AnswerEnd | None = None
    scores: PromptScores | None = None
    describe: Callable[[Floats | None, int], TokenLogprob] | None = None
    next_ids: Callable[[Message], list[int]] | None = None
    initial_events: list[Event] = field(default_factory=list)  # what to tell before anything else
    submitted: float = 0.0
    started_at: float = 0.0
    read: float = 0.0
    notified: float = 0.0
    place: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter: NgramDrafter | None = field(init=False, default=None)
    drafter_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.drafter_length = len(self.sequence.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.sequence.prompt)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be drawn."""
        return self.output.finish_reason is not None or self.output.tokens >= self.most

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.most - self.output.tokens

    @property
    def reasoning_is_over(self) -> bool:
        """Whether it thinks and shall not think on: the budget is spent, or somebody wants the answer now."""
        if not self.output.in_reasoning:
            return False
        if self.structured_output is not None and self.structured_output.must_answer(self.left, len(self.closing)):
            return True
        budget = self.thinking_budget
        spent = budget is not None and self.output.reasoning_tokens >= budget
        return spent or self.generation.answer_requested

    def sample(self, logits: Floats) -> tuple[int, list[Event]]:
        """Choose the next token by logits (V,); the token, and the events it makes certain."""
        sequence, answer, structured_output = self.sequence, self.output, self.structured_output
        in_reasoning = answer.in_reasoning
        restricted = logits if self.processors is None else self.processors.change(logits, sequence.tokens)
        if structured_output is not None:
            restricted = structured_output.restrict(restricted, in_reasoning)
        if self.answer_end is not None:
            restricted = self.answer_end.restrict(restricted, answer.tokens)
        token = self.sampler.sample(restricted, sequence.tokens, len(sequence.tokens))
        left = self.left - 1
        while structured_output is not None and not structured_output.permits(token, in_reasoning, left):
            restricted = structured_output.narrow(restricted, token, left)
            token = self.sampler.sample(restricted, sequence.tokens, len(sequence.tokens))
        entry = None if self.describe is None else self.describe(logits, token)
        sequence.tokens.append(token)
        if structured_output is not None and structured_output.take(token, in_reasoning, left):
            answer.begin(calls=token == structured_output.call_tag)
        events = list(answer.push(token, entry))
        if structured_output is not None and (structured_output.is_over or (not left and structured_output.is_whole)):
            answer.end()
        return token, events

    def close_reasoning(self) -> list[Event]:
        """Write the end of the thought for the model, as far as there is room; it goes on behind it."""
        events: list[Event] = []
        self.output.cut_character()
        for token in self.closing:
            if self.is_over:
                break
            self.sequence.tokens.append(token)
            events += self.output.push(token, None if self.describe is None else self.describe(None, token))
        return events

    def accept(self, drafted: int, right: int) -> None:
        """Of the draft tokens of the last step so many were right; the drafter learns of that and what came."""
        self.drafted += drafted
        self.accepted += right
        if self.drafter is not None:
            self.drafter.accept(drafted, right)
            self.drafter.extend(self.sequence.tokens[self.drafter_length :])
        self.drafter_length = len(self.sequence.tokens)

    def usage(self) -> Usage:
        """What it has cost by now."""
        now = time.perf_counter()
        started_at, read = self.started_at or now, self.read or now
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output.tokens,
            reasoning_tokens=self.output.reasoning_tokens,
            cached_tokens=self.sequence.cached,
            prompt_ms=1000 * (read - started_at),
            completion_ms=1000 * (now - read),
            queue_ms=1000 * (started_at - self.submitted),
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
