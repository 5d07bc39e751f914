"""From a conversation to the token ids that the model reads: rendered, continued, and made to fit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from notso.smollm3.common_prefix import common_length
from notso.smollm3.errors import ContextLengthError, InvalidRequestError, ModelFileError
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.special_tokens import Run
from notso.smollm3.text.tokenizer import Tokenizer, check_unicode
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import RequestOptions

CLOSE_SPELT = "</think>"
GENERATION_TOKENS = 1024
"""What is kept free for an answer of no stated length when old turns are left out, in a context large enough."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids; whether they end with the beginning of the answer itself, and with which text of it; how many
    messages were left out; whether a thought may come next."""

    ids: list[int]
    goes_on: bool = False
    dropped_messages: int = 0
    started: str = ""
    may_think: bool = False


class PromptWriter:
    """Writes prompts with one file's template and tokenizer. Safe to use from several threads."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        close = tokenizer.think_close_id
        middle = tokenizer.encode(CLOSE_SPELT) if close is None else [close]
        self.end_of_reasoning = (*tokenizer.encode("\n"), *middle, *tokenizer.encode("\n"))

    @property
    def template(self) -> ChatTemplate:
        """The file's template. Raises ModelFileError where there is none."""
        if self._template is None:
            raise ModelFileError("this model file has no chat template; give token ids instead of messages")
        return self._template

    @property
    def template_source(self) -> str:
        """See ModelInfo."""
        return self._template.source if self._template is not None else ""

    @property
    def template_drops(self) -> tuple[str, ...]:
        """See ModelInfo."""
        return self._template.drops if self._template is not None else ()

    def write(self, messages: Sequence[Message], options: RequestOptions, *, most_tokens: int | None = None) -> Prompt:
        """The prompt for the next answer or, with `continue_last`, for more of the last message, an assistant's.

        Control tokens come from the template only, never from what a message says. Raises ContextLengthError for one
        that is certainly longer than `most_tokens`.
        """
        earlier, started = messages, None
        if options.continue_last:
            earlier, started = messages[:-1], messages[-1]
            if not isinstance(started, Message) or started.role != "assistant" or started.tool_calls:
                raise InvalidRequestError("only an assistant's text can be continued", param="messages")
        ids = self.template.encode(
            self._tokenizer,
            earlier,
            thinking=options.thinking,
            tools=options.tools,
            date=options.date,
            most_tokens=most_tokens,
        )
        if started is not None and most_tokens is not None:
            self._tokenizer.check_length([started.content], most_tokens)
        if started is None:
            return Prompt(ids, may_think=self.may_think(ids))
        beginning = self._started_ids(started, options.thinking)
        if not beginning:  # nothing of it is left: thoughts, and it may not think
            return Prompt(ids, may_think=self.may_think(ids))
        return Prompt(ids + beginning, goes_on=True, started=started.content)

    def beginning(self, messages: Sequence[Message], options: RequestOptions) -> list[int]:
        """What every prompt begins with that goes on from `messages` with words of a person or of a tool; empty where
        the template is not a known one, and takes a process of its own."""
        encode = self._tokenizer.encode_runs
        if not self.template.is_known:
            return []
        one, other = (
            self._runs([*messages, Message("user", words)], options)
            for words in ("a", "1")  # of no token in common
        )
        same = common_length(one, other)
        ids, others = encode(one[same : same + 1]), encode(other[same : same + 1])
        return encode(one[:same]) + ids[: common_length(ids, others)]

    def last_turn_at(self, prompt: Prompt, messages: Sequence[Message], options: RequestOptions) -> int:
        """With which token of `prompt`, written for `messages`, the last one's turn begins, or a little before; its
        length where the template is not a known one, as in `beginning`."""
        if not self.template.is_known:
            return len(prompt.ids)
        head = 1 if messages[0].role == "system" else 0
        earlier, last = [*messages[:head], *messages[head + prompt.dropped_messages : -1]], messages[-1]
        one, other = (
            self._runs([*earlier, replace(last, content=words)], options)
            for words in (last.content, f"a{last.content}")
        )
        same = common_length(one, other)
        return len(prompt.ids) - len(self._tokenizer.encode_runs(one[same:]))

    def may_think(self, ids: Sequence[int]) -> bool:
        """Whether the last turn has no thought yet: the last special token is none of its tags."""
        special = (token for token in reversed(ids) if token in self._tokenizer.special_ids)
        return next(special, None) not in (self._tokenizer.think_close_id, self._tokenizer.think_open_id)

    def write_for(
        self,
        messages: Sequence[Message],
        options: RequestOptions,
        *,
        context_tokens: int,
        kept_free: int,
    ) -> Prompt:
        """`write`; or, with `when_full` "drop_oldest", `write_fitting`."""

        def write(kept: Sequence[Message]) -> Prompt:
            return self.write(kept, options, most_tokens=context_tokens)

        if options.when_full == "stop":
            return write(messages)
        return self.write_fitting(messages, write, context_tokens, kept_free)

    def write_fitting(
        self,
        messages: Sequence[Message],
        write: Callable[[Sequence[Message]], Prompt],
        context_tokens: int,
        kept_free: int,
    ) -> Prompt:
        """The prompt that leaves out as few as it can of the oldest turns, whole ones, so that `kept_free` tokens of
        the context are left for the answer; where even the last turn leaves fewer, one will do.

        Instructions at the beginning and the last turn always stay. Raises ContextLengthError where those do not fit.
        """
        limit = context_tokens - kept_free

        def attempt(kept: Sequence[Message]) -> Prompt | ContextLengthError:
            try:
                return write(kept)
            except ContextLengthError as error:  # so long that it was not even counted
                return error

        prompt = attempt(messages)
        if isinstance(prompt, Prompt) and len(prompt.ids) <= limit:
            return prompt
        head = 1 if messages[0].role == "system" else 0
        starts = [at for at in range(head + 1, len(messages)) if messages[at].role == "user"]
        low, high = 0, len(starts)  # starts[low - 1] is known not to do; starts[high] is
        best: Prompt | None = None
        while low < high:
            middle = (low + high) // 2
            prompt = attempt([*messages[:head], *messages[starts[middle] :]])
            if isinstance(prompt, Prompt) and len(prompt.ids) <= limit:
                best = replace(prompt, dropped_messages=starts[middle] - head)
                high = middle
            else:
                low = middle + 1
        if best is not None:
            return best
        if isinstance(prompt, ContextLengthError):
            raise prompt
        if len(prompt.ids) >= context_tokens:
            raise ContextLengthError(len(prompt.ids) + 1, context_tokens)
        return replace(prompt, dropped_messages=starts[-1] - head if starts else 0)

    def _runs(self, messages: Sequence[Message], options: RequestOptions) -> list[Run]:
        return self.template.runs(messages, thinking=options.thinking, tools=options.tools, date=options.date)

    def _started_ids(self, started: Message, thinking: bool) -> list[int]:
        """What the assistant has said so far, as the model would have written it."""
        for text in (started.content, started.reasoning_content or ""):
            check_unicode(text, "messages")
        encode, open_id = self._tokenizer.encode, self._tokenizer.think_open_id
        if not thinking or not started.reasoning_content or open_id is None:
            return encode(started.content)
        ids = [open_id, *encode(f"\n{started.reasoning_content}")]
        if started.content:
            ids += [*self.end_of_reasoning, *encode(started.content)]
        return ids


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as a list. Raises InvalidRequestError unless they are whole numbers of this vocabulary, one or more."""
    if len(ids) == 0:
        raise InvalidRequestError("there are no tokens", param="messages")
    try:
        tokens = [operator.index(token) for token in ids]
    except TypeError:
        raise InvalidRequestError("messages or token ids are needed", param="messages") from None
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}", param="messages")
    return tokens
