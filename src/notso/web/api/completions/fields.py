"""The fields of a plain completion's body, and what they become: text to be written on, without a chat around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from notso.smollm3 import MAX_TOP_LOGPROBS, RequestOptions
from notso.web.api.request_fields.field_reader import invalid, read_fields, unsupported
from notso.web.api.request_fields.fields import Notes, Text, inert, later, refused, works
from notso.web.api.request_fields.grammar_fields import GRAMMAR_NOTES, GrammarFields, grammar_of
from notso.web.api.request_fields.hints import hints_of
from notso.web.api.request_fields.sampling_fields import (
    WITHIN_SAMPLING,
    check_stream_options,
    sampling_of,
)
from notso.web.api.shared.api_request import ApiRequest

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # the API's own


class TextFields(GrammarFields):
    """The body of POST /v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Fields whose value, if it is this, asks for nothing.
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


TEXT_NOTES: Notes = GRAMMAR_NOTES | {
    "prompt": works(
        f"a text, or up to {MAX_PROMPTS}, each of which is answered; nothing in it is a control token",
        "give text; token ids are not taken",
    ),
    "max_tokens": works("longest answer; 16 if left out, as the API has it; what fits if -1, or more than that"),
    "echo": works("true: the prompt stands before the answer; not with `logprobs`"),
    "logprobs": works("0 to 20 likeliest tokens with each, in the older form's four lists"),
    "best_of": inert("1", "use n"),
    "suffix": inert("an empty text", "the model has no tokens for filling gaps; ask it in a chat"),
    "response_format": later("use json_schema, or /v1/chat/completions"),
    "tools": refused("use /v1/chat/completions"),
    "messages": refused("use /v1/chat/completions, or give a prompt"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(ApiRequest):
    """What a program asked for, checked."""

    echo: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False


def parse_text_request(body: Mapping[str, Any]) -> TextRequest:
    """Check the body of a plain completion. Raises ApiError (400), whose `param` names the field."""
    if _holds_ids(body.get("prompt")):
        raise unsupported("prompt", f"this value of prompt is not supported: {TEXT_NOTES['prompt'].advice}")
    if isinstance(prompts := body.get("prompt"), list) and len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt holds at most {MAX_PROMPTS} texts")
    fields = read_fields(TextFields, body, TEXT_NOTES | WITHIN_SAMPLING)
    check_stream_options(fields)
    texts = (fields.prompt,) if isinstance(fields.prompt, str) else tuple(fields.prompt)
    if not all(texts):
        raise invalid("prompt", "prompt is empty: there is nothing to write on", "empty_prompt")
    if fields.echo and fields.logprobs is not None:
        raise invalid("echo", "echo has no log probabilities: leave out one of the two")
    grammar, said_by = grammar_of(fields)
    longest = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    return TextRequest(
        model=fields.model,
        prompts=texts,
        params=sampling_of(fields, longest, None, fields.logprobs),
        hints=hints_of(fields, body),
        names={"messages": "prompt", "top_logprobs": "logprobs", "response_format": said_by},
        options=RequestOptions(thinking=False, grammar=grammar, top_logprobs=fields.logprobs),
        stream=bool(fields.stream),
        fresh=fields.cache_prompt is False,
        echo=bool(fields.echo),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_progress=bool(fields.return_progress),
        timings_per_token=bool(fields.timings_per_token),
    )


def _holds_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(each, int | list) for each in prompt)
