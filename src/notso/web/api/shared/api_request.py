"""API-independent representation of a request, and the response header that lists ignored fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import quote

from notso.smollm3 import (
    QUOTE_OF,
    InvalidRequestError,
    Message,
    ModelInfo,
    RequestOptions,
    SamplingParams,
    ToolName,
    dropped_parts,
    ignored_keywords,
)
from notso.web.api.request_fields.fields import MAX_HINTS, RequestHint, invalid_field, unsupported_field
from notso.web.api.request_fields.sampling_fields import MAX_PROMPT_IDS

Prompt = tuple[Message, ...] | tuple[int, ...] | str
"""The messages of a conversation, or the token ids or text that the model continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A validated request. Each prompt is answered once for each of `params`."""

    model: str | None = None  # as spelled by the client; None: the default model
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    options: RequestOptions
    stream: bool = False
    include_usage: bool = False  # end the stream with a chunk that contains token counts
    return_progress: bool = False  # stream the progress of prompt processing
    timings_per_token: bool = False  # add the timings so far to each chunk
    fresh: bool = False  # do not use cached prompts
    store: bool = False  # store the answer, so that the client can retrieve and continue it
    background: bool = False  # generate without a connection; the client polls by id
    keep_stream: bool = False  # continue the stream after a restart; has an effect only with X-Conversation-Id
    prompt_limit: int | None = None  # maximum prompt length in tokens; longer prompts are refused
    keep_alive_s: float | None = None  # seconds that the model stays loaded afterward; negative: unlimited
    names: Mapping[str, str] = field(default_factory=dict)  # engine's field name -> this API's, for errors
    ignored: tuple[str, ...] = ()  # ignored parts besides `hints`, such as lines removed from the prompt
    hints: tuple[RequestHint, ...] = ()  # fields that are accepted, but ignored

    def in_named_conversation(self) -> Self:
        """If `keep_stream` is set, remove the hint that `store` is ignored.

        Call this only for requests with X-Conversation-Id, in which `store` has an effect.
        """
        return replace(self, hints=tuple(hint for hint in self.hints if not self.keep_stream or hint.name != "store"))

    def check_prompt(self, index: int, count: Callable[[Prompt], int]) -> None:
        """Raise ApiError (400) for a prompt that exceeds `prompt_limit`. `count` returns a prompt's token count."""
        if self.prompt_limit is not None and (length := count(self.prompts[index])) > self.prompt_limit:
            name = self.prompt_name(index) if len(self.prompts) > 1 else "the prompt"
            raise unsupported_field(
                "truncate_prompt_tokens",
                f"{name} has {length:,} tokens, and prompts are never cut: shorten it, or remove "
                "truncate_prompt_tokens",
            )

    def prompt_name(self, index: int) -> str:
        """Return a prompt's field name, with an index if there are several."""
        name = self.names.get("messages", "messages")
        return f"{name}.{index}" if len(self.prompts) > 1 else name

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages of the only prompt."""
        return tuple(each for each in self.prompts[0] if isinstance(each, Message))

    @property
    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        return ((prompt, params) for prompt in self.prompts for params in self.params)


def check_prompts(name: str, prompts: object, max_prompts: int) -> None:
    """Check a list of texts or token ids. Raises ApiError (400) naming the first item of the wrong type."""
    # This check precedes pydantic's, because pydantic's errors could refer to the wrong type of list.
    if not isinstance(prompts, list):
        return
    if any(isinstance(each, int) for each in prompts):
        _check_ids(name, prompts)
        return
    if len(prompts) > max_prompts:
        raise invalid_field(name, f"{name} is limited to {max_prompts:,} texts or lists of token ids")
    if any(isinstance(each, list) for each in prompts):
        for index, each in enumerate(prompts):
            if not isinstance(each, list) or not each:
                raise invalid_field(f"{name}.{index}", f"{name}.{index} must be a list of one or more token ids")
            _check_ids(f"{name}.{index}", each)


def _check_ids(name: str, ids: list[object]) -> None:
    if len(ids) > MAX_PROMPT_IDS:
        raise invalid_field(name, f"{name} is limited to {MAX_PROMPT_IDS:,} token ids")
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise invalid_field(f"{name}.{index}", f"{name}.{index} must be a token id, as part of a list of token ids")


def to_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Convert a string, a list of token ids, or a list of either to prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value[0], int):
        return (tuple(value),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in value)


def last_user_message(messages: Sequence[Message]) -> int:
    """Return the index of the last user message, or -1 if there is none."""
    return max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)


IGNORED = "x-notso-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64
MAX_WORK = 64 * 65_536
"""Maximum number of tokens and alternatives (top_logprobs) in a response. It limits the work that a request causes."""


def find_dropped_parts(info: ModelInfo, api_request: ApiRequest, *, strict: bool) -> list[str]:
    """Return the message parts that the chat template drops. If `strict`, raise ApiError (400) for them."""
    found: dict[str, None] = {}
    for prompt in api_request.prompts:
        messages = [each for each in prompt if isinstance(each, Message)] if info.template_drops else []
        if messages:
            roles, has_tools = [each.role for each in messages], bool(api_request.options.tools)
            found |= dict.fromkeys(dropped_parts(info.template_drops, roles, messages[0].content, has_tools))
    if found and strict:
        message = f"the model's chat template would omit {next(iter(found))}, which --strict-fields refuses"
        raise invalid_field("messages", message, "unsupported_value")
    return list(found)


def check_work(info: ModelInfo, api_request: ApiRequest) -> None:
    """Raise ApiError (400) if the response could have more than MAX_WORK tokens and alternatives."""
    context = info.context_of(api_request.options)
    tokens = sum(min(params.max_tokens or context, context) for _, params in api_request.choices)
    work = tokens * (1 + (api_request.options.top_logprobs or 0))
    if work > MAX_WORK:
        formula = "max_tokens x n x prompts x (1 + top_logprobs)"
        raise invalid_field("max_tokens", f"{formula} is {work:,}; the maximum is {MAX_WORK:,}")


def ignored_headers(api_request: ApiRequest, dropped: Iterable[str] = ()) -> dict[str, str]:
    """Return the header that lists ignored fields. Raises InvalidRequestError for an invalid schema."""
    keywords = _ignored_keywords(api_request.options)
    # The schema keyword QUOTE_OF is enforced, not ignored, if the request has sources to quote.
    keywords = (name for name in keywords if name != QUOTE_OF or not api_request.options.sources)
    hints = (hint.name for hint in api_request.hints)
    return format_ignored_header((*dropped, *api_request.ignored, *hints, *keywords))


def format_ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    names = dict.fromkeys(ignored)
    value = ", ".join(quote(name[:MAX_NAME_CHARACTERS], safe=" :$@/") for name in [*names][:MAX_NAMES])
    at_least = "at least " if len(names) >= MAX_HINTS else ""  # `find_hints` reports no more than MAX_HINTS
    more = f", and {at_least}{len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return {IGNORED: value + more} if value else {}


def _ignored_keywords(options: RequestOptions) -> Iterator[str]:
    if options.grammar is not None and options.grammar.kind == "json_schema":
        yield from ignored_keywords(options.grammar.source)
    all_enforced = options.tool_choice == "required" or isinstance(options.tool_choice, ToolName)
    for tool in options.tools or ():
        function = tool["function"]
        if function.get("parameters") is not None and (all_enforced or function["name"] in options.strict_tools):
            try:
                yield from ignored_keywords(json.dumps(function["parameters"]))
            except InvalidRequestError as error:  # add the tool's name to the engine's message
                message = f"the parameters of {function['name']} cannot be enforced: {error}"
                raise InvalidRequestError(message, param="tools") from None
