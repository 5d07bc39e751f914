"""Tokenization, detokenization, prompt rendering and token counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from notso.smollm3 import InvalidRequestError
from notso.web.api.chat_completions.fields import ChatRequest, parse_chat_request
from notso.web.api.request_fields.fields import (
    Fields,
    Label,
    Notes,
    RequestHint,
    Text,
    find_hints,
    invalid_field,
    read_fields,
    works,
)
from notso.web.api.shared.api_request import find_dropped_parts, ignored_headers
from notso.web.api.shared.given_documents import (
    Files,
    find_openai_files,
    parse_with_files,
    read_body_with_files,
    read_openai_request,
)
from notso.web.api.shared.serializer import LargeJSONResponse
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import (
    count_prompt_tokens,
    hint_headers,
    read_fields_and_headers,
    run_prompt_work,
    serving,
)
from notso.web.edge.access import GUARDED

router = APIRouter()

MAX_TOKENS = 1 << 18
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # from the model's tokenizer_config.json


class TokenizeFields(Fields):
    """The body of POST /tokenize."""

    content: Text | None = None
    prompt: Text | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    model: Label | None = None
    messages: list[Any] | None = None  # parsed as a chat completion request, together with the other _CHAT_FIELDS
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


TOKENIZE_NOTES: Notes = {
    "content": works("the text"),
    "prompt": works("vLLM's name for `content`; the response then also has `count` and `max_model_len`"),
    "parse_special": works(
        "true: recognize control tokens in the text; default: true with `prompt`, as in vLLM, otherwise false"
    ),
    "with_pieces": works(
        "true: return each token with its text, or with a list of its bytes if these are not whole characters"
    ),
    "add_special_tokens": works("accepted; the tokenizer adds no special tokens"),
    "add_special": works("accepted; the tokenizer adds no special tokens"),
    "model": works("a name listed by `GET /v1/models`; optional"),
    "messages": works(
        "a conversation whose prompt is tokenized, as in vLLM; cannot be combined with `content` or `prompt`"
    ),
    "tools": works("with `messages`, as in a chat completion"),
    "add_generation_prompt": works("with `messages`, as in a chat completion"),
    "continue_final_message": works("with `messages`, as in a chat completion"),
    "chat_template_kwargs": works("with `messages`, as in a chat completion"),
    "return_token_strs": works("true: return `token_strs`, the text of each token"),
}
_CHAT_FIELDS = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class DetokenizeFields(Fields):
    """The body of POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
    model: Label | None = None


DETOKENIZE_NOTES: Notes = {
    "tokens": works("a list of up to 262,144 token ids"),
    "model": works("a name listed by `GET /v1/models`; optional"),
}


@router.post("/tokenize", dependencies=[GUARDED])
async def tokenize(request: Request, services: Services) -> Response:
    """Tokenize a text, or the prompt of `messages`. Control tokens in the text are recognized if `parse_special` is
    true (the default with `prompt`)."""
    fields, conversation, hints = await read_body_with_files(request, find_openai_files, _tokenize_request)
    headers = hint_headers(request, hints)
    is_prompt = fields.content is None
    text = fields.prompt if is_prompt else fields.content
    special = is_prompt if fields.parse_special is None else fields.parse_special
    async with serving(services, fields.model) as model:
        engine, info = model.engine, model.info

        def work() -> Response:
            if conversation is not None:
                ids: list[Any] = list(engine.encode_chat(conversation.messages, conversation.options))
            else:
                ids = engine.tokenize(text or "", special=special)
            strings: dict[str, list[str]] = {}
            if fields.return_token_strs:
                strings = {"token_strs": [each.decode("utf-8", "replace") for each in engine.token_bytes(ids)]}
            if fields.with_pieces:  # a piece is built only once per distinct token, because long texts repeat tokens
                distinct = list(dict.fromkeys(ids))
                texts = map(_text_or_bytes, engine.token_bytes(distinct))
                pieces = {id: {"id": id, "piece": text} for id, text in zip(distinct, texts, strict=True)}
                ids = [pieces[id] for id in ids]
            more = {"count": len(ids), "max_model_len": info.context_tokens} if is_prompt else {}
            return LargeJSONResponse({"tokens": ids} | strings | more, headers=headers)

        return await run_prompt_work(request, work)


def _tokenize_request(
    body: Mapping[str, Any], files: Files
) -> tuple[TokenizeFields, ChatRequest | None, tuple[RequestHint, ...]]:
    fields = read_fields(TokenizeFields, body, TOKENIZE_NOTES)
    sources = [name for name in ("content", "prompt", "messages") if getattr(fields, name) is not None]
    if not sources:
        raise invalid_field("content", "content, prompt or messages is required")
    if len(sources) > 1:
        raise invalid_field("content", f"only one of {' and '.join(sources)} is allowed")
    hints = find_hints(fields, body)
    if fields.messages is None:
        return fields, None, hints
    chat_body = {name: body[name] for name in _CHAT_FIELDS if name in body}
    conversation = parse_with_files(chat_body, files, parse_chat_request)
    return fields, conversation, (*hints, *conversation.hints)


@router.get("/tokenizer_info", dependencies=[GUARDED])
async def tokenizer_info(services: Services) -> Response:
    """Return control tokens and context length, in vLLM's format."""
    async with serving(services) as model:
        return JSONResponse(
            {
                "tokenizer_class": TOKENIZER_CLASS,
                "bos_token": None,
                "eos_token": model.info.end_token,
                "model_max_length": model.info.context_tokens,
            }
        )


@router.post("/detokenize", dependencies=[GUARDED])
async def detokenize(request: Request, services: Services) -> Response:
    """Return the text of token ids, with control tokens, both as `content` (llama-server) and as `prompt` (vLLM)."""
    fields, headers = await read_fields_and_headers(request, DetokenizeFields, DETOKENIZE_NOTES)
    async with serving(services, fields.model) as model:
        engine = model.engine

        def work() -> Response:
            text = engine.detokenize(fields.tokens)
            return JSONResponse({"content": text, "prompt": text}, headers=headers)

        try:
            return await run_prompt_work(request, work)
        except InvalidRequestError as error:
            raise invalid_field("tokens", str(error)) from None


@router.post("/chat/completions/input_tokens", dependencies=[GUARDED])
@router.post("/v1/chat/completions/input_tokens", dependencies=[GUARDED])
async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a chat completion."""
    api_request = await read_openai_request(request, parse_chat_request)
    count, headers = await count_prompt_tokens(request, api_request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count}, headers=headers)


@router.post("/apply-template", dependencies=[GUARDED])
async def apply_template(request: Request, services: Services) -> Response:
    """Render the prompt of a chat completion and count its tokens."""
    api_request = await read_openai_request(request, parse_chat_request)
    if api_request.options.continue_last:
        raise invalid_field("messages", "the template cannot continue a response: remove the last assistant message")
    async with serving(services, api_request.model) as model:
        engine = model.engine
        dropped = find_dropped_parts(model.info, api_request, strict=services.shared.settings.strict_fields)

        def work() -> Response:
            prompt = engine.render(api_request.messages, api_request.options)
            count = engine.count_tokens(api_request.messages, api_request.options)
            return JSONResponse({"prompt": prompt, "n_tokens": count}, headers=ignored_headers(api_request, dropped))

        return await run_prompt_work(request, work)


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
