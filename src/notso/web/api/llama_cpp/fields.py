"""The fields of llama.cpp's own completion: those of the samplers by its names, and what it alone knows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from notso.smollm3 import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from notso.web.api.request_fields.fields import Fields, Name, Notes, Text, hint, inert, refused, works
from notso.web.api.request_fields.grammar_fields import GRAMMAR_NOTES, GrammarFields
from notso.web.api.request_fields.hints import Hint
from notso.web.api.request_fields.sampling_fields import MAX_PROMPT_IDS, MAX_PROMPTS, WITHIN_SAMPLING

MAX_RESPONSE_FIELDS = 64
MAX_TEXTS = 1024
"""Of one request, each made into tokens by itself."""
BANNED = -100.0
"""The bias that `false` means: no token comes back from there."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = float | Literal[False]


class PromptObject(Fields):
    """A text that pictures could stand in, of which there are none."""

    prompt_string: Text


Pieces = Annotated[list[TokenId | Text], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
"""Token ids and texts, one behind the other."""
PromptField = (
    Text
    | PromptObject
    | Pieces
    | Annotated[list[Text | PromptObject | Pieces], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)
BiasPair = Annotated[tuple[TokenId | Text, Bias], Strict(False)]
Biases = (
    Annotated[list[BiasPair], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True)]
    | Annotated[dict[Text, Bias], Field(max_length=MAX_LOGIT_BIAS)]
)


class NativeFields(GrammarFields):
    """The body of POST /completion."""

    prompt: PromptField
    n_cmpl: Annotated[int, Field(ge=1)] | None = None
    logit_bias: Biases | None = None  # type: ignore[assignment]  # more forms than the API's of which it is a field
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[Name], Field(max_length=MAX_RESPONSE_FIELDS, fail_fast=True)] | None = None
    post_sampling_probs: Literal[False] | None = None
    draft_most: Annotated[Any, Hint(), Field(alias="speculative.n_max")] = None
    draft_fewest: Annotated[Any, Hint(), Field(alias="speculative.n_min")] = None
    draft_likely: Annotated[Any, Hint(), Field(alias="speculative.p_min")] = None


NATIVE_NOTES: Notes = GRAMMAR_NOTES | {
    "prompt": works(
        'a text, a list of token ids and texts, or `{"prompt_string": text}`; or a list of up to '
        f"{MAX_PROMPTS} of these, each of which is answered; with up to {MAX_TEXTS:,} texts in all. "
        "The spelling of a control token is that token"
    ),
    "max_tokens": works("another name of `n_predict`"),
    "n_predict": works("longest answer; what fits if left out or -1; 0 reads the prompt and writes nothing"),
    "n_cmpl": works("another name of `n`"),
    "logit_bias": works(
        "up to 1,024 pairs of a token id, or a text for all its tokens, with -100..100 or false, which is -100; or an "
        "object of these"
    ),
    "n_probs": works("0 to 20 likeliest tokens with each, by the model alone, before any filter"),
    "return_tokens": works("true: the answer's token ids; in a stream they come anyway"),
    "response_fields": works(
        "the names of what the whole answer is to hold, a slash before those of parts of parts; a stream tells all"
    ),
    "post_sampling_probs": inert("false", "probabilities are the model's own, before any filter; use n_probs"),
    "speculative.n_max": hint("draft tokens change no answer"),
    "speculative.n_min": hint("draft tokens change no answer"),
    "speculative.p_min": hint("draft tokens change no answer"),
    "lora": refused("adapters are not offered"),
    "response_format": refused("use json_schema"),
    "messages": refused("use /v1/chat/completions, or give a prompt"),
}

WITHIN_NATIVE: Notes = WITHIN_SAMPLING | {
    "prompt_string": works("the text"),
    "multimodal_data": refused("the model reads text only"),
}
"""Of what lies within those."""
