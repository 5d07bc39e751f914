"""The body of llama.cpp's own completion becomes prompts of token ids and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from notso.smollm3 import MAX_LOGIT_BIAS, InvalidRequestError, RequestOptions, SamplingParams
from notso.web.api.llama_cpp.fields import (
    BANNED,
    MAX_TEXTS,
    NATIVE_NOTES,
    WITHIN_NATIVE,
    Biases,
    NativeFields,
    PromptField,
    PromptObject,
)
from notso.web.api.request_fields.field_reader import invalid, read_fields
from notso.web.api.request_fields.grammar_fields import grammar_of
from notso.web.api.request_fields.hints import hints_of
from notso.web.api.request_fields.sampling_fields import (
    MAX_PROMPTS,
    check_stream_options,
    either,
    sampling_of,
)
from notso.web.api.shared.api_request import ApiRequest
from notso.web.edge.api_error import api_error_of

RANDOM_SEED = -1

Piece = int | str
TokenBias = tuple[Piece, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(ApiRequest):
    """What a program asked for, checked. `pieces` of each prompt, and `biases`, hold texts until they are `tokenized`;
    then `texts` is what the prompts say. `n_predict`: what was asked for, -1 for what fits. `is_list`: the answer is
    one."""

    pieces: tuple[tuple[Piece, ...], ...]
    biases: tuple[TokenBias, ...] = ()
    texts: tuple[str, ...] = ()
    n_predict: int = -1
    n_probs: int = 0
    is_list: bool = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()
    return_progress: bool = False
    timings_per_token: bool = False


def parse_native_request(body: Mapping[str, Any]) -> NativeRequest:
    """Check the body of a completion. Raises ApiError (400), whose `param` names the field."""
    fields = read_fields(NativeFields, body, NATIVE_NOTES | WITHIN_NATIVE)
    check_stream_options(fields)
    pieces = tuple(_pieces(fields.prompt))
    if len(pieces) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt holds at most {MAX_PROMPTS} texts, or lists of token ids")
    if sum(isinstance(piece, str) for prompt in pieces for piece in prompt) > MAX_TEXTS:
        raise invalid("prompt", f"prompt holds at most {MAX_TEXTS:,} texts: join those that stand beside each other")
    grammar, said_by = grammar_of(fields)
    longest = either(fields, "n_predict", "max_tokens", "max_new_tokens")
    n_probs = fields.n_probs or 0
    wants_tokens = bool(fields.stream or fields.return_tokens or n_probs)
    plain = fields.model_copy(
        update={
            "n": either(fields, "n", "n_cmpl"),
            "seed": None if fields.seed == RANDOM_SEED else fields.seed,
            "logit_bias": None,
        }
    )
    params = sampling_of(plain, longest or 1 if longest is not None else None, None, n_probs)
    return NativeRequest(
        model=fields.model,
        prompts=(),
        pieces=pieces,
        biases=tuple(_biases(fields.logit_bias)),
        params=params,
        hints=hints_of(fields, body),
        names={"messages": "prompt", "max_tokens": "n_predict", "response_format": said_by},
        options=RequestOptions(
            thinking=False,
            grammar=grammar,
            logits_processors=tuple(fields.logits_processors or ()),
            top_logprobs=n_probs if wants_tokens else None,
            prompt_only=longest == 0,
            is_plain=True,
        ),
        stream=bool(fields.stream),
        fresh=fields.cache_prompt is False,
        n_predict=-1 if longest is None else longest,
        n_probs=n_probs,
        is_list=len(params) > 1 or _holds_prompts(fields.prompt),
        return_tokens=bool(fields.return_tokens),
        response_fields=tuple(fields.response_fields or ()),
        return_progress=bool(fields.return_progress),
        timings_per_token=bool(fields.timings_per_token),
    )


def tokenized(
    asked: NativeRequest, tokenize: Callable[[str], list[int]], detokenize: Callable[[list[int]], str]
) -> NativeRequest:
    """With prompts of token ids, and biases of them. Raises ApiError (400) for ids that are none of this model's, and
    for what holds no token, or too many."""
    try:
        prompts = [[token for piece in pieces for token in _ids(piece, tokenize)] for pieces in asked.pieces]
        if not all(prompts):
            raise invalid("prompt", "prompt is empty: there is nothing to write on", "empty_prompt")
        texts = tuple(map(detokenize, prompts))
        bias = {token: bias for piece, bias in asked.biases for token in _ids(piece, tokenize)}
        if len(bias) > MAX_LOGIT_BIAS:
            raise invalid("logit_bias", f"logit_bias holds at most {MAX_LOGIT_BIAS:,} tokens")
        params: tuple[SamplingParams, ...] = tuple(replace(each, logit_bias=bias) for each in asked.params)
    except InvalidRequestError as error:
        raise api_error_of(error).called(asked.names) from None
    return replace(asked, prompts=tuple(map(tuple, prompts)), texts=texts, params=params)


def _ids(piece: Piece, tokenize: Callable[[str], list[int]]) -> list[int]:
    return [piece] if isinstance(piece, int) else tokenize(piece)


def _holds_prompts(given: PromptField) -> bool:
    return isinstance(given, list) and not any(isinstance(each, int) for each in given)


def _pieces(given: PromptField) -> Iterator[tuple[Piece, ...]]:
    if isinstance(given, str):
        yield (given,)
    elif isinstance(given, PromptObject):
        yield (given.prompt_string,)
    elif _holds_prompts(given):
        for each in given:
            if not isinstance(each, int):
                yield tuple(each) if isinstance(each, list) else next(_pieces(each))
    else:
        yield tuple(each for each in given if isinstance(each, int | str))


def _biases(given: Biases | None) -> Iterator[TokenBias]:
    pairs = given.items() if isinstance(given, dict) else given or ()
    for piece, bias in pairs:
        is_id = isinstance(piece, str) and isinstance(given, dict) and piece.isascii() and piece.isdigit()
        yield int(piece) if is_id else piece, BANNED if bias is False else bias
