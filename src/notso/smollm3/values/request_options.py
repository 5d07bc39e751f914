"""What may be said about how a prompt is to be answered, besides the sampling: one value, listed and checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date as Date
from typing import Literal, TypeAlias, get_args

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.values.messages import Message, Priority, Tool, WhenFull

MAX_TOP_LOGPROBS = 20

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be: any JSON object, JSON of a schema (`source` is the schema as JSON text), a text that a
    regular expression describes, one of a JSON list of texts, or a text that a grammar derives: in GBNF, llama.cpp's
    notation, or in Lark's."""

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        _require(isinstance(self.source, str), "grammar", "given as text")


@dataclass(frozen=True, slots=True)
class ToolName:
    """The one tool that is to be called."""

    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | ToolName
PromptInput: TypeAlias = Sequence[Message] | Sequence[int] | str
"""A conversation, for the template; or a prompt as it is: token ids, or plain text in which nothing is a control token.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a prompt is to be answered: what `Engine.submit` and whatever stands in for it takes beside the sampling.

    thinking: whether the model may think first. tools: what it may call. tool_choice: "auto" leaves that to the model,
    "none" keeps it from calling, "required" makes it call, a ToolName makes it call that tool, once.
    parallel_tool_calls: whether it may call more than once. strict_tools: the names of those whose arguments follow
    their schema also where the model is free to call; where it must call, those of all tools do. grammar: what the
    answer, behind the thoughts, must be; it is that, or ends for its length, a stop string or a cancellation.
    top_logprobs: with each token its log probability and those of so many likeliest (0 to 20); None gives none.
    prompt_logprobs: the same of the prompt's tokens, in `prompt` events; nothing of the prompt is taken from the cache.
    prompt_only: the prompt is read, and nothing is written. is_plain: a prompt of token ids is text to be written on,
    and what comes is text and nothing else, as behind a prompt that is text. date: the day the prompt names. priority:
    whom to serve first where there are many. owner: whose cached prompts may be used. conversation: by what name what
    is computed for it can be forgotten again; None: only with everything else. continue_last: the last message is an
    assistant's, and more of it is wanted (of its thoughts too, if it may think). when_full: refuse a conversation that
    does not fit, or leave out whole turns, the oldest first, and say so. adapter: the name of a loaded one that is
    computed with. logits_processors: names of those that change the logits first, in this order.

    Raises InvalidRequestError, which names the option.
    """

    thinking: bool = True
    tools: Sequence[Tool] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    strict_tools: tuple[str, ...] = ()
    grammar: Grammar | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    is_plain: bool = False
    date: Date | None = None
    priority: Priority = "interactive"
    owner: str = ""
    conversation: str | None = None
    continue_last: bool = False
    when_full: WhenFull = "stop"
    adapter: str | None = None
    logits_processors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("priority", get_args(Priority)), ("when_full", get_args(WhenFull))):
            _require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")
        are_tools = self.tools is None or (isinstance(self.tools, Sequence) and not isinstance(self.tools, str))
        _require(are_tools, "tools", "a list")
        choice_is_known = isinstance(self.tool_choice, ToolName) or self.tool_choice in ("auto", "none", "required")
        _require(choice_is_known, "tool_choice", "auto, none, required or a ToolName")
        _require(isinstance(self.parallel_tool_calls, bool), "parallel_tool_calls", "true or false")
        for name in ("strict_tools", "logits_processors"):
            names = getattr(self, name)
            are_names = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
            _require(are_names, name, "names, in a tuple")
        grammar = self.grammar
        is_grammar = grammar is None or (isinstance(grammar, Grammar) and grammar.kind in get_args(GrammarKind))
        _require(is_grammar, "grammar", f"a Grammar of a kind of {', '.join(get_args(GrammarKind))}")
        for name in ("top_logprobs", "prompt_logprobs"):
            top = getattr(self, name)
            is_count = top is None or (type(top) is int and 0 <= top <= MAX_TOP_LOGPROBS)
            _require(is_count, name, f"a whole number from 0 to {MAX_TOP_LOGPROBS}")
        _require(self.date is None or isinstance(self.date, Date), "date", "a datetime.date")
        for name in ("prompt_only", "is_plain"):
            _require(isinstance(getattr(self, name), bool), name, "true or false")
        _require(self.adapter is None or isinstance(self.adapter, str), "adapter", "the name of one that is loaded")
        _require(isinstance(self.owner, str) and _is_unicode(self.owner), "owner", "text in valid Unicode")
        is_name = self.conversation is None or (isinstance(self.conversation, str) and _is_unicode(self.conversation))
        _require(is_name, "conversation", "text in valid Unicode")

    def require_for_prompt(self, *, is_text: bool) -> None:
        """What a prompt that is no conversation (token ids, or text) has no use for must not be asked for.

        Raises InvalidRequestError.
        """
        senseless = ["date", "continue_last", "when_full", *(["tools", "tool_choice"] if is_text else [])]
        for name in senseless:
            if getattr(self, name) != getattr(RequestOptions(), name):
                raise InvalidRequestError(f"{name} needs messages; this prompt is read as it is", param=name)


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{name} must be {what}", param=name)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
