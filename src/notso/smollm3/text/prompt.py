"""Write prompts as token ids: render messages, continue answers, and drop turns if the prompt exceeds the context."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from notso.smollm3.common_prefix import common_length
from notso.smollm3.errors import ContextLengthError, InvalidRequestError, ModelFileError
from notso.smollm3.text.chat_template import ChatTemplate, check_message
from notso.smollm3.text.tokenizer import Run, Tokenizer, check_unicode
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import RequestOptions

CLOSE_TAG = "</think>"
# Number of tokens that are left free for an answer without `max_tokens` when old turns are dropped. In small contexts,
# fewer tokens are left free.
GENERATION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt."""

    ids: list[int]
    goes_on: bool = False  # whether the prompt ends with the beginning of the answer
    dropped_messages: int = 0
    started: str = ""  # text of the beginning of the answer
    may_think: bool = False  # whether the answer may begin with reasoning


class PromptWriter:
    """Writes prompts with one template and tokenizer. Thread-safe."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        close = tokenizer.think_close_id
        middle = tokenizer.encode(CLOSE_TAG) if close is None else [close]
        self.end_of_reasoning = (*tokenizer.encode("\n"), *middle, *tokenizer.encode("\n"))

    @property
    def template(self) -> ChatTemplate:
        """The file's template. Raises ModelFileError if it has none."""
        if self._template is None:
            raise ModelFileError("this model file has no chat template; use token ids instead of messages")
        return self._template

    @property
    def template_source(self) -> str:
        return self._template.source if self._template is not None else ""

    @property
    def template_drops(self) -> tuple[str, ...]:
        return self._template.drops if self._template is not None else ()

    def write(self, messages: Sequence[Message], options: RequestOptions, *, most_tokens: int | None = None) -> Prompt:
        """Return the prompt for the next answer or, with `continue_last`, for the rest of the last answer.

        Raises ContextLengthError if the prompt far exceeds `most_tokens`.
        """
        earlier, started = messages, None
        if options.continue_last and messages:
            earlier, started = messages[:-1], messages[-1]
            if not isinstance(started, Message) or started.role != "assistant" or started.tool_calls:
                raise InvalidRequestError("only the text of an assistant message can be continued", param="messages")
            check_message(started)
        ids = self.template.encode(
            self._tokenizer,
            earlier,
            thinking=options.thinking,
            tools=options.tools,
            date=options.date,
            most_tokens=most_tokens,
        )
        if started is not None and most_tokens is not None:
            thoughts = started.reasoning_content if options.thinking else None
            self._tokenizer.check_length([started.content, thoughts or ""], most_tokens)
        if started is None:
            return Prompt(ids, may_think=self.may_think(ids))
        beginning = self._continued_ids(started, options.thinking)
        if not beginning:  # the message is empty, or has only reasoning and thinking is off
            return Prompt(ids, may_think=self.may_think(ids))
        return Prompt(ids + beginning, goes_on=True, started=started.content)

    def beginning(self, messages: Sequence[Message], options: RequestOptions) -> list[int]:
        """Return the tokens with which all prompts that continue `messages` begin; [] for unknown templates."""
        encode = self._tokenizer.encode_runs
        if not self.template.is_known:  # each rendering would start a child process
            return []
        one, other = (
            self._render_runs([*messages, Message("user", words)], options)
            for words in ("a", "1")  # texts whose first tokens differ
        )
        same = common_length(one, other)
        ids, others = encode(one[same : same + 1]), encode(other[same : same + 1])
        return encode(one[:same]) + ids[: common_length(ids, others)]

    def last_turn_at(self, prompt: Prompt, messages: Sequence[Message], options: RequestOptions) -> int:
        """Return the index of a token at or shortly before the last message's text; for unknown templates, the prompt's
        length."""
        if not self.template.is_known:
            return len(prompt.ids)
        head = 1 if messages[0].role == "system" else 0
        earlier, last = [*messages[:head], *messages[head + prompt.dropped_messages : -1]], messages[-1]
        one, other = (
            self._render_runs([*earlier, replace(last, content=words)], options)
            for words in (last.content, f"a{last.content}")
        )
        same = common_length(one, other)
        return len(prompt.ids) - len(self._tokenizer.encode_runs(one[same:]))

    def prefix_tokens(self, prompt: Prompt, messages: Sequence[Message], options: RequestOptions) -> int:
        """Return how many tokens of a prompt depend only on `options.prefix`, or 0 if the prefix was dropped.

        Raises InvalidRequestError if the prefix is longer than the messages.
        """
        prefix = options.prefix
        if prefix is None:
            return 0
        if prefix.message >= len(messages) or prefix.characters > len(messages[prefix.message].content):
            raise InvalidRequestError("prefix ends after the end of the messages", param="prefix")
        head = 1 if messages[0].role == "system" else 0
        if prefix.message >= head:
            if prefix.message < head + prompt.dropped_messages:
                return 0
            earlier = [*messages[:head], *messages[head + prompt.dropped_messages : prefix.message]]
        else:
            earlier = []
        content = messages[prefix.message].content
        # Renders the prefix again, followed by a different text. The tokens that stay the same depend only on the
        # prefix.
        differs = "1" if content[prefix.characters :].startswith("a") else "a"
        cut = Message(messages[prefix.message].role, content[: prefix.characters] + differs)
        other = self._tokenizer.encode_runs(self._render_runs([*earlier, cut, Message("user", differs)], options))
        return common_length(prompt.ids, other)

    def may_think(self, ids: Sequence[int]) -> bool:
        special = (token for token in reversed(ids) if token in self._tokenizer.special_ids)
        return next(special, None) not in (self._tokenizer.think_close_id, self._tokenizer.think_open_id)

    def write_within_context(
        self,
        messages: Sequence[Message],
        options: RequestOptions,
        *,
        context_tokens: int,
        reserved_tokens: int,
    ) -> Prompt:
        """Return the prompt. With "drop_oldest", drop only as many of the oldest turns as needed to keep
        `reserved_tokens` free.

        If only the system message and the last turn remain, one free token suffices. Raises ContextLengthError if no
        token is free.
        """
        if options.when_full == "stop":
            return self.write(messages, options, most_tokens=context_tokens)
        limit = context_tokens - reserved_tokens

        def attempt(remaining: Sequence[Message]) -> Prompt | ContextLengthError:
            try:
                return self.write(remaining, options, most_tokens=context_tokens)
            except ContextLengthError as error:
                return error

        prompt = attempt(messages)
        if isinstance(prompt, Prompt) and len(prompt.ids) <= limit:
            return prompt
        head = 1 if messages[0].role == "system" else 0
        starts = [at for at in range(head + 1, len(messages)) if messages[at].role == "user"]
        low, high = 0, len(starts)  # starts[low - 1] does not fit; starts[high] does
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

    def _render_runs(self, messages: Sequence[Message], options: RequestOptions) -> list[Run]:
        return self.template.runs(messages, thinking=options.thinking, tools=options.tools, date=options.date)

    def _continued_ids(self, started: Message, thinking: bool) -> list[int]:
        for text in (started.content, started.reasoning_content or ""):
            check_unicode(text, "messages")
        encode, open_id = self._tokenizer.encode, self._tokenizer.think_open_id
        if not thinking or not started.reasoning_content or open_id is None:
            return encode(started.content)
        ids = [open_id, *encode(f"\n{started.reasoning_content}")]
        if started.content:
            ids += [*self.end_of_reasoning, *encode(started.content)]
        return ids


def validate_ids(ids: Sequence[int], vocab_size: int, *, least: int = 1) -> list[int]:
    """Return valid ids as a list. Raises InvalidRequestError for invalid ids or fewer than `least`."""
    try:
        if len(ids) < least:
            raise InvalidRequestError("the prompt has no tokens", param="messages")
        tokens = [operator.index(token) for token in ids]
    except TypeError:
        raise InvalidRequestError("messages or token ids are required", param="messages") from None
    if min(tokens, default=0) < 0 or max(tokens, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}", param="messages")
    return tokens
