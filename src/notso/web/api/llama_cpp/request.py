"""llama.cpp's completion endpoint: fields, routes, response format, and sampling parameters under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Strict
from starlette.responses import Response

from notso.smollm3 import (
    MAX_LOGIT_BIAS,
    MAX_TOP_LOGPROBS,
    PARAMETERS,
    Event,
    InvalidRequestError,
    ModelInfo,
    RequestOptions,
    SamplingParams,
    TokenLogprob,
)
from notso.web.api.request_fields.fields import (
    Fields,
    Name,
    Notes,
    Text,
    find_hints,
    hint,
    inert,
    invalid_field,
    notes_in,
    read_fields,
    refused,
    works,
)
from notso.web.api.request_fields.sampling_fields import (
    GRAMMAR_NOTES,
    MAX_CHOICES,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    TEXT_FORMAT,
    WITHIN_SAMPLING,
    GrammarFields,
    TextFormat,
    Whole,
    get_by_alias,
    read_grammar,
    to_sampling_params,
)
from notso.web.api.shared.api_request import ApiRequest
from notso.web.api.shared.completion import logprob_entry, new_choice, new_id, timings
from notso.web.api.shared.serializer import Serializer, data_event, progress_body
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import read_body, respond, run_prompt_work, serving
from notso.web.edge.access import GUARDED
from notso.web.edge.errors import api_error_of
from notso.web.engine.model_names import model_id

SHOWN_RANDOM_SEED = 0xFFFFFFFF
"""Seed that responses report, as in llama.cpp, if the request has no seed."""
_ORDER = (
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("typical_p", "xtc_probability", "xtc_threshold", "repeat_last_n", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "mirostat", "adaptive_target", "adaptive_decay", "stop", "max_tokens", "n_predict"),
    *("n_keep", "n_discard", "ignore_eos", "logit_bias"),
)
"""Order of the parameters in llama.cpp's responses. Other parameters follow."""
_NOT_LLAMA_CPP = ("min_tokens", "stop_token_ids")
"""Parameters that llama.cpp lacks; `generation_settings` omits them."""


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return parameters under llama.cpp's names. Unsupported samplers are reported as off."""
    named = {
        next(iter(api_names)): list(value) if isinstance(value := getattr(params, name), tuple) else value
        for name, each in PARAMETERS.items()
        if (api_names := each.names("openai")) and name not in _NOT_LLAMA_CPP
    }
    max_tokens = -1 if params.max_tokens is None else params.max_tokens
    settings = named | {
        "seed": SHOWN_RANDOM_SEED if params.seed is None else params.seed,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_n_sigma": -1.0,
        "repeat_last_n": params.penalty_window or -1,
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
    }
    return {name: settings[name] for name in dict.fromkeys((*_ORDER, *settings))}


MAX_RESPONSE_FIELDS = 64
MAX_TEXTS = 1024
"""Maximum number of prompt texts per request; each is tokenized separately."""
BANNED = -100.0
"""Bias of a token whose entry in `logit_bias` is `false`; in practice, it excludes the token."""

MAX_ID_DIGITS = 10  # token ids are less than 1 << 31, which has ten digits

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = float | Literal[False]


class PromptObject(Fields):
    """A prompt that may contain media in llama.cpp. Only text is supported here."""

    prompt_string: Text


Pieces = Annotated[list[TokenId | Text], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
"""A prompt given as a sequence of token ids and texts."""
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

_DRAFT = hint("draft tokens do not change responses")


class NativeFields(GrammarFields):
    """The body of POST /completion."""

    prompt: PromptField
    n_cmpl: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Biases | None = None  # type: ignore[assignment]  # more forms than the inherited field
    n_probs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[Name], Field(max_length=MAX_RESPONSE_FIELDS, fail_fast=True)] | None = None
    post_sampling_probs: Literal[False] | None = None
    response_format: TextFormat | None = None
    draft_most: Annotated[Any, _DRAFT, Field(alias="speculative.n_max")] = None
    draft_fewest: Annotated[Any, _DRAFT, Field(alias="speculative.n_min")] = None
    draft_likely: Annotated[Any, _DRAFT, Field(alias="speculative.p_min")] = None


NATIVE_NOTES: Notes = GRAMMAR_NOTES | {
    "prompt": works(
        f"one prompt, or a list of up to {MAX_PROMPTS} prompts, each answered separately. A prompt is a string, "
        '`{"prompt_string": text}`, or a list of token ids and strings. At most '
        f"{MAX_TEXTS:,} strings per request. Control tokens in strings are recognized"
    ),
    "max_tokens": works("alias of `n_predict`"),
    "n_predict": works("maximum tokens; if it is omitted or -1, as many as fit; 0: only process the prompt"),
    "n_cmpl": works("alias of `n`"),
    "logit_bias": works(
        "up to 1,024 pairs of a token and its bias, or an object that maps tokens to biases. Give a token as its "
        "id, or give a string to bias every token in it; a bias is -100 to 100, or false for -100"
    ),
    "n_probs": works(
        "number of most likely tokens to return at each position, 0 to 20, with their log probabilities before "
        "temperature and filters"
    ),
    "return_tokens": works("true: return token ids; streams always contain them"),
    "response_fields": works(
        "names of the fields to return, if the response is not streamed; slashes separate the names of nested fields"
    ),
    "post_sampling_probs": inert(
        "false", "only probabilities before temperature and filters are available; use n_probs"
    ),
    **notes_in(NativeFields),
    "image_data": refused("the model reads text only"),
    "lora": refused("send the adapter's name as model"),
    "response_format": inert(TEXT_FORMAT, "use json_schema"),
    "messages": refused("use /v1/chat/completions, or a prompt"),
}

WITHIN_NATIVE: Notes = WITHIN_SAMPLING | {
    "prompt_string": works("the text"),
    "multimodal_data": refused("the model reads text only"),
}
"""Notes on nested fields."""


Piece = int | str
TokenBias = tuple[Piece, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(ApiRequest):
    """A validated request. `tokenize_request` tokenizes `pieces` and `biases`."""

    pieces: tuple[tuple[Piece, ...], ...]
    biases: tuple[TokenBias, ...] = ()
    texts: tuple[str, ...] = ()  # text of each prompt, set by `tokenize_request`
    n_predict: int = -1  # as requested; -1: unlimited
    n_probs: int = 0
    is_list: bool = False  # respond with a list
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()


def parse_native_request(body: Mapping[str, Any]) -> NativeRequest:
    """Validate a completion request. Raises ApiError (400) naming the field."""
    fields = read_fields(NativeFields, body, NATIVE_NOTES, WITHIN_NATIVE)
    pieces = tuple(_pieces(fields.prompt))
    if len(pieces) > MAX_PROMPTS:
        raise invalid_field("prompt", f"prompt may contain at most {MAX_PROMPTS} prompts")
    if sum(isinstance(piece, str) for prompt in pieces for piece in prompt) > MAX_TEXTS:
        raise invalid_field(
            "prompt", f"the prompts may contain at most {MAX_TEXTS:,} texts in total: join adjacent ones"
        )
    grammar, grammar_field = read_grammar(fields)
    max_tokens = get_by_alias(fields, "n_predict", "max_tokens", "max_new_tokens")
    n_probs = fields.n_probs or 0
    needs_tokens = bool(fields.stream or fields.return_tokens or n_probs)
    plain = fields.model_copy(
        update={
            "n": get_by_alias(fields, "n", "n_cmpl"),
            "seed": None if fields.seed == SHOWN_RANDOM_SEED else fields.seed,
            "logit_bias": None,
        }
    )
    params = to_sampling_params(plain, max_tokens or 1 if max_tokens is not None else None)
    return NativeRequest(
        **fields.common,
        prompts=(),
        pieces=pieces,
        biases=tuple(_biases(fields.logit_bias)),
        params=params,
        hints=find_hints(fields, body),
        names={"messages": "prompt", "max_tokens": "n_predict", "response_format": grammar_field},
        options=RequestOptions(
            thinking=False,
            grammar=grammar,
            logits_processors=tuple(fields.logits_processors or ()),
            top_logprobs=n_probs if needs_tokens else None,
            prompt_only=max_tokens == 0,
            is_plain=True,
        ),
        n_predict=-1 if max_tokens is None else max_tokens,
        n_probs=n_probs,
        is_list=len(params) > 1 or _is_prompt_list(fields.prompt),
        return_tokens=bool(fields.return_tokens),
        response_fields=tuple(fields.response_fields or ()),
    )


def tokenize_request(
    api_request: NativeRequest, tokenize: Callable[[str], list[int]], detokenize: Callable[[list[int]], str]
) -> NativeRequest:
    """Tokenize prompts and biases. Raises ApiError (400) for invalid or empty prompts, or too many biases."""
    try:
        prompts = [[token for piece in pieces for token in _ids(piece, tokenize)] for pieces in api_request.pieces]
        if not all(prompts):
            raise invalid_field("prompt", "prompt is empty", "empty_prompt")
        texts = tuple(map(detokenize, prompts))
        bias = {token: bias for piece, bias in api_request.biases for token in _ids(piece, tokenize)}
        if len(bias) > MAX_LOGIT_BIAS:
            raise invalid_field("logit_bias", f"logit_bias is limited to {MAX_LOGIT_BIAS:,} tokens")
        params: tuple[SamplingParams, ...] = tuple(replace(each, logit_bias=bias) for each in api_request.params)
    except InvalidRequestError as error:
        raise api_error_of(error).called(api_request.names) from None
    return replace(api_request, prompts=tuple(map(tuple, prompts)), texts=texts, params=params)


def _ids(piece: Piece, tokenize: Callable[[str], list[int]]) -> list[int]:
    return [piece] if isinstance(piece, int) else tokenize(piece)


def _is_prompt_list(prompt: PromptField) -> bool:
    return isinstance(prompt, list) and not any(isinstance(each, int) for each in prompt)


def _pieces(prompt: PromptField) -> Iterator[tuple[Piece, ...]]:
    if isinstance(prompt, str):
        yield (prompt,)
    elif isinstance(prompt, PromptObject):
        yield (prompt.prompt_string,)
    elif _is_prompt_list(prompt):
        for each in prompt:
            if not isinstance(each, int):
                yield tuple(each) if isinstance(each, list) else next(_pieces(each))
    else:
        yield tuple(each for each in prompt if isinstance(each, int | str))


def _biases(biases: Biases | None) -> Iterator[TokenBias]:
    pairs = biases.items() if isinstance(biases, dict) else biases or ()
    for piece, bias in pairs:
        if isinstance(biases, dict) and isinstance(piece, str) and piece.isascii() and piece.isdigit():
            if len(piece) > MAX_ID_DIGITS:
                raise invalid_field("logit_bias", f"logit_bias: a token id has at most {MAX_ID_DIGITS} digits")
            piece = int(piece)
        yield piece, BANNED if bias is False else bias


NO_SLOT = -1
"""Value of `id_slot` in all responses, because requests are not assigned to slots."""


class NativeSerializer(Serializer):
    """Writes an event per text fragment, then one with `stop: true` per choice, but no end marker."""

    def __init__(self, api_request: NativeRequest, info: ModelInfo, id: str) -> None:
        self._request = api_request
        self._info = info
        self._params = [params for _ in api_request.prompts for params in api_request.params]
        self._choices = [new_choice(logprobs=True, live_timings=api_request.timings_per_token) for _ in self._params]
        self._stopped_by: list[str | None] = [None for _ in self._params]
        self.id = id

    def fresh_copy(self) -> NativeSerializer:
        return NativeSerializer(self._request, self._info, self.id)

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        choice = self._choices[number]
        more = choice.timings_so_far(event)
        delta = choice.add(event)
        if delta is not None and "content" in delta:
            if self._request.n_probs:
                more["completion_probabilities"] = _probabilities(event.logprobs)
            yield self._piece(number, delta["content"], [each.id for each in event.logprobs], **more)
        elif event.progress is not None and self._request.return_progress:
            yield self._piece(number, "", [], prompt_progress=progress_body(event.progress), **more)
        if event.kind == "end":
            self._stopped_by[number] = event.stop
            yield data_event(self._final(number) | {"content": "", "tokens": []})

    def body(self) -> Any:
        whole = [self._select_fields(self._final(number)) for number in range(len(self._choices))]
        return whole if self._request.is_list else whole[0]

    def _piece(self, number: int, content: str, tokens: list[int], **more: Any) -> bytes:
        written = len(self._choices[number].content_logprobs or ())
        return data_event(
            {
                "index": number,
                "content": content,
                "tokens": tokens,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": written,
            }
            | more
        )

    def _final(self, number: int) -> dict[str, Any]:
        choice, params = self._choices[number], self._params[number]
        usage, entries = choice.usage, choice.content_logprobs or []
        read, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        was_cut, stop = choice.finish_reason == "length", self._stopped_by[number]
        reason = {"length": "limit", "cancelled": "none"}.get(choice.finish_reason, "eos")
        body = {
            "index": number,
            "content": choice.content,
            "tokens": [each.id for each in entries] if self._request.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": model_id(self._info),
            "tokens_predicted": written,
            "tokens_evaluated": read,
            "tokens_cached": usage.cached_tokens if usage else 0,
            "generation_settings": self._settings(params),
            "prompt": self._request.texts[number // len(self._request.params)],
            "has_new_line": "\n" in choice.content,
            "truncated": was_cut and read + written >= self._info.context_tokens,
            "stop_type": reason if stop is None else "word",
            "stopping_word": stop or "",
            "timings": timings([choice]),
        }
        return body | ({"completion_probabilities": _probabilities(entries)} if self._request.n_probs else {})

    def _settings(self, params: SamplingParams) -> dict[str, Any]:
        request = self._request
        return generation_settings(params) | {
            "n_predict": request.n_predict,
            "max_tokens": request.n_predict,
            "n_probs": request.n_probs,
            "stream": request.stream,
            "timings_per_token": request.timings_per_token,
            "n_ctx": self._info.context_tokens,
            "model": model_id(self._info),
        }

    def _select_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        # A name with slashes, such as a/b, selects a nested value.
        if not self._request.response_fields:
            return body
        found: dict[str, Any] = {}
        for name in self._request.response_fields:
            value: Any = body
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found


def _probabilities(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.id} | logprob_entry(token)


router = APIRouter()


@router.post("/completion", dependencies=[GUARDED])
@router.post("/completions", dependencies=[GUARDED])
async def completion(request: Request, services: Services) -> Response:
    """Continue a text, in llama.cpp's format. Control tokens in the text are recognized. Disconnecting stops the
    answer, unless X-Conversation-Id or Idempotency-Key was sent."""
    parsed = await read_body(request, parse_native_request)
    async with serving(services, parsed.model) as model:
        tokenize, detokenize = partial(model.engine.tokenize, special=True), model.engine.detokenize
        api_request = await run_prompt_work(request, lambda: tokenize_request(parsed, tokenize, detokenize))
    return await respond(request, api_request, lambda info: NativeSerializer(api_request, info, new_id("cmpl-")))
