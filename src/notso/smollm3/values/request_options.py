"""Define the options of a request, and keyword arguments for options and sampling parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date as Date
from typing import Any, Literal, TypeAlias, get_args

from notso.smollm3.errors import InvalidRequestError, UnknownOptionError, require
from notso.smollm3.values.messages import Message, Priority, Tool, WhenFull
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams, SamplingSettings
from notso.text_file import is_unicode

MAX_TOP_LOGPROBS = 20
QUOTE_OF = "x-quote-of"
"""JSON Schema keyword that names the source from which a string must be quoted."""
MAX_SOURCES = 999  # answers refer to sources by numbers of up to three digits

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on an answer. `source`: JSON schema, regular expression, JSON list of choices, GBNF or Lark."""

    kind: GrammarKind
    source: str = ""  # not used for "json_object", which allows any JSON object

    def __post_init__(self) -> None:
        require(isinstance(self.source, str), "grammar", "given as a string")


@dataclass(frozen=True, slots=True)
class ToolName:
    """The tool that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class FixedPrefix:
    """The fixed beginning of a prompt, such as documents.

    message: index of the message in which the prefix ends.
    characters: number of its leading characters that belong to the prefix.
    scope: requests with the same scope share the prefix's KV blocks, even if their owners differ. None: share only with
        the same owner.
    reading: name under which the blocks are kept on disk; unique per scope or, without a scope, per owner. None: cache
        the blocks like those of any conversation.

    Raises InvalidRequestError.
    """

    message: int
    characters: int
    scope: str | None = None
    reading: str | None = None

    def __post_init__(self) -> None:
        for name in ("message", "characters"):
            value = getattr(self, name)
            is_count = type(value) is int and value >= 0
            require(is_count, "prefix", f"a FixedPrefix in which {name} is a whole number, 0 or more")
        for name in ("scope", "reading"):
            value = getattr(self, name)
            require(value != "", "prefix", f"a FixedPrefix in which {name} is not empty; without a {name}, use None")
            is_text = value is None or (isinstance(value, str) and is_unicode(value))
            require(is_text, "prefix", f"a FixedPrefix in which {name} is None or text in valid Unicode")


@dataclass(frozen=True, slots=True)
class Replay:
    """The first tokens of an answer, as reported by `tokens` events.

    closed_at: indexes in `ids` at which the engine ended the reasoning.
    origin: value in the original `started` event, which the new request's origin must equal. "": accept any.

    Raises InvalidRequestError.
    """

    ids: tuple[int, ...]
    closed_at: tuple[int, ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        for name in ("ids", "closed_at"):
            values = getattr(self, name)
            are_numbers = isinstance(values, tuple) and all(type(each) is int and each >= 0 for each in values)
            require(are_numbers, "replay", f"a Replay in which {name} is a tuple of whole numbers, 0 or more")
        require(isinstance(self.origin, str), "replay", "a Replay in which origin is text")


@dataclass(frozen=True, slots=True)
class QuoteSource:
    """A text in the prompt that the answer can quote as `[[n: words]]`, where n is the source's number, from 1.

    Structured output refers to `name` in `x-quote-of`.

    Raises InvalidRequestError.
    """

    text: str
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "name"):
            value = getattr(self, name)
            is_text = isinstance(value, str) and is_unicode(value)
            require(is_text, "sources", f"QuoteSources in which {name} is text in valid Unicode")


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | ToolName
# Messages for the template, token ids, or plain text without control tokens.
PromptInput: TypeAlias = Sequence[Message] | Sequence[int] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of `Engine.submit` other than sampling parameters.

    thinking: allow reasoning.
    tools: tools that the model can call.
    tool_choice: "auto", "none", "required", or a ToolName (called once).
    parallel_tool_calls: allow several calls.
    strict_tools: names of tools whose argument schemas are enforced even if tool_choice is "auto". With required
        calls or a grammar, all schemas are enforced.
    grammar: constraint on the answer, but not on reasoning or calls; a cut-off answer may violate it.
    top_logprobs: report log probabilities with this many alternatives (0 to 20). None: do not report them.
    prompt_logprobs: the same for prompt tokens, in `prompt` events; the cache is not used.
    prompt_only: prefill without generating.
    embedding: with prompt_only, report the prompt's mean last-layer hidden state, scaled to norm 1, in an `embedding`
        event; the cache is not used.
    is_plain: with a prompt of token ids, treat the answer as plain text, without reasoning.
    date: day shown in the prompt.
    priority: scheduling class.
    owner: only requests of the same owner share cached blocks, except those of a `prefix` with a scope.
    conversation: name by which `clear_cache` can remove the cached blocks.
    continue_last: extend the last assistant message, or its reasoning.
    when_full: if a conversation exceeds the context, reject it ("stop"), or drop the oldest turns ("drop_oldest").
    adapter: name of a loaded adapter.
    logits_processors: names of processors, in order of application.
    prefix: fixed beginning of the prompt.
    token_ids: report the answer's ids in `tokens` events.
    replay: first tokens of the answer. Their events are sent first.
    sources: texts in the prompt that the answer can quote. Text between `[[n: ` and `]]` must occur in source n.

    Raises InvalidRequestError with the option's name.
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
    embedding: bool = False
    is_plain: bool = False
    date: Date | None = None
    priority: Priority = "interactive"
    owner: str = ""
    conversation: str | None = None
    continue_last: bool = False
    when_full: WhenFull = "stop"
    adapter: str | None = None
    logits_processors: tuple[str, ...] = ()
    prefix: FixedPrefix | None = None
    token_ids: bool = False
    replay: Replay | None = None
    sources: tuple[QuoteSource, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("priority", get_args(Priority)), ("when_full", get_args(WhenFull))):
            value = getattr(self, name)
            require(isinstance(value, str) and value in choices, name, f"one of {', '.join(choices)}")
        are_tools = self.tools is None or (isinstance(self.tools, Sequence) and not isinstance(self.tools, str))
        require(are_tools, "tools", "a list")
        choice = self.tool_choice
        is_known = isinstance(choice, str) and choice in ("auto", "none", "required")
        is_named = isinstance(choice, ToolName) and isinstance(choice.name, str)
        require(is_known or is_named, "tool_choice", "auto, none, required or a ToolName")
        for name in ("strict_tools", "logits_processors"):
            names = getattr(self, name)
            are_names = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
            require(are_names, name, "a tuple of names")
        grammar = self.grammar
        is_grammar = grammar is None or (isinstance(grammar, Grammar) and grammar.kind in get_args(GrammarKind))
        require(is_grammar, "grammar", f"a Grammar of one of the kinds {', '.join(get_args(GrammarKind))}")
        for name in ("top_logprobs", "prompt_logprobs"):
            top = getattr(self, name)
            is_count = top is None or (type(top) is int and 0 <= top <= MAX_TOP_LOGPROBS)
            require(is_count, name, f"a whole number from 0 to {MAX_TOP_LOGPROBS}")
        require(self.date is None or isinstance(self.date, Date), "date", "a datetime.date")
        for name in _FLAGS:
            require(isinstance(getattr(self, name), bool), name, "true or false")
        require(self.prompt_only or not self.embedding, "embedding", "combined with prompt_only")
        require(self.adapter is None or isinstance(self.adapter, str), "adapter", "the name of a loaded adapter")
        require(isinstance(self.owner, str) and is_unicode(self.owner), "owner", "text in valid Unicode")
        require(self.prefix is None or isinstance(self.prefix, FixedPrefix), "prefix", "a FixedPrefix")
        require(self.replay is None or isinstance(self.replay, Replay), "replay", "a Replay")
        require(self.replay is None or not self.prompt_only, "replay", "given without prompt_only")
        are_sources = isinstance(self.sources, tuple) and all(isinstance(each, QuoteSource) for each in self.sources)
        require(
            are_sources and len(self.sources) <= MAX_SOURCES, "sources", f"a tuple of up to {MAX_SOURCES} QuoteSources"
        )
        is_name = self.conversation is None or (isinstance(self.conversation, str) and is_unicode(self.conversation))
        require(is_name, "conversation", "text in valid Unicode")

    def require_for_prompt(self, *, is_text: bool) -> None:
        """Raise InvalidRequestError for options that require messages."""
        names = ["date", "continue_last", "when_full", "prefix", *(["tools", "tool_choice"] if is_text else [])]
        for name in names:
            if getattr(self, name) != getattr(RequestOptions(), name):
                raise InvalidRequestError(
                    f"{name} requires messages, because other prompts use no chat template", param=name
                )


_FLAGS = ("thinking", "parallel_tool_calls", "prompt_only", "embedding", "is_plain", "continue_last", "token_ids")


class AnswerSettings(SamplingSettings, total=False):
    """Keyword arguments for the fields of SamplingParams and RequestOptions."""

    thinking: bool
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    strict_tools: Sequence[str]
    grammar: Grammar | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    prompt_only: bool
    embedding: bool
    is_plain: bool
    date: Date | None
    priority: Priority
    owner: str
    conversation: str | None
    continue_last: bool
    when_full: WhenFull
    adapter: str | None
    logits_processors: Sequence[str]
    prefix: FixedPrefix | None
    token_ids: bool
    replay: Replay | None
    sources: Sequence[QuoteSource]


_SAMPLING = frozenset(PARAMETERS)
_OPTIONS = frozenset(each.name for each in fields(RequestOptions))


def apply_settings(
    params: SamplingParams | None, options: RequestOptions | None, settings: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """Apply `settings` to params and options. Raises UnknownOptionError or InvalidRequestError."""
    require_known(settings, _SAMPLING | _OPTIONS, "an answer")
    sampling = {name: value for name, value in settings.items() if name in _SAMPLING}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    changes = {name: value for name, value in settings.items() if name in _OPTIONS}
    for name in ("strict_tools", "logits_processors", "sources"):
        if isinstance(changes.get(name), list):
            changes[name] = tuple(changes[name])
    params, options = with_defaults(params, options)
    given = (*params.given, *sampling)
    return (replace(params, **sampling, given=given) if sampling else params), replace(options, **changes)


def with_defaults(
    params: SamplingParams | None, options: RequestOptions | None
) -> tuple[SamplingParams, RequestOptions]:
    """Replace None with defaults. Raises InvalidRequestError for invalid types."""
    params = SamplingParams() if params is None else params
    options = RequestOptions() if options is None else options
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("params must be SamplingParams; pass several messages in one list", param="params")
    if not isinstance(options, RequestOptions):
        raise InvalidRequestError("options must be RequestOptions", param="options")
    return params, options


def require_known(settings: Iterable[str], known: Iterable[str], subject: str) -> None:
    """Raise UnknownOptionError for names not in `known`."""
    names = sorted(known)
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UnknownOptionError(f"{subject} has no setting {name!r}{hint}", param=str(name))
