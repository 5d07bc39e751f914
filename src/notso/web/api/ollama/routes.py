"""Ollama's chat and generate endpoints, and errors for unsupported endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.web.api.ollama.fields import (
    OllamaEmbedding,
    OllamaRequest,
    parse_chat,
    parse_embed,
    parse_embedding,
    parse_generate,
)
from notso.web.api.ollama.models import listed_name, plain_name
from notso.web.api.ollama.stream import MEDIA_TYPE, NANOSECONDS, Kind, OllamaSerializer
from notso.web.api.request_fields.fields import unsupported
from notso.web.api.shared.api_request import ignored_headers
from notso.web.api.shared.embedding import Embeddings, embeddings_of
from notso.web.api.shared.serializer import large_response
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import CONVERSATION, Owner, chosen_model, read_body, respond, serving
from notso.web.edge.access import GUARDED, caller_of
from notso.web.edge.api_error import ApiError
from notso.web.values.wording import words

router = APIRouter()


@router.post("/api/chat", dependencies=[GUARDED])
async def chat(request: Request, services: Services, owner: Owner) -> Response:
    """Answer a conversation, in Ollama's format. Disconnecting stops the answer."""
    return await _answer(request, services, owner, "chat", parse_chat)


@router.post("/api/generate", dependencies=[GUARDED])
async def generate(request: Request, services: Services, owner: Owner) -> Response:
    """Answer a prompt, in Ollama's format. Disconnecting stops the answer."""
    return await _answer(request, services, owner, "generate", parse_generate)


async def _answer(
    request: Request,
    services: ApiServices,
    owner: str,
    kind: Kind,
    parse: Callable[[Mapping[str, Any]], OllamaRequest],
) -> Response:
    if CONVERSATION in request.headers:
        raise unsupported(
            CONVERSATION, "X-Conversation-Id is not supported here, because JSON lines have no event numbers"
        )
    asked = await read_body(request, parse, of_any_type=True)
    host = services.shared.engine
    asked = replace(asked, model=plain_name(asked.given_name, host.default.info))
    # Other users share the model, so only operators control its residency.
    if asked.keep_alive_s is not None and not caller_of(request).is_operator:
        if (asked.only_loads and asked.keep_alive_s == 0) or services.shared.settings.strict_fields:
            raise ApiError(403, "forbidden", words["error_operator"], param="keep_alive")
        asked = replace(asked, keep_alive_s=None, ignored=(*asked.ignored, "keep_alive"))
    if asked.only_loads:
        choice = await chosen_model(services, asked.model)
        served = host.model(choice.model)
        if asked.keep_alive_s == 0:  # unload: must not load the model first
            host.keep(served, 0)
            name = asked.given_name or served.name
            return JSONResponse(OllamaSerializer(asked, kind, name).unloaded(), headers=ignored_headers(asked))
        async with serving(services, asked.model) as model:
            if asked.keep_alive_s is not None:
                host.keep(served, asked.keep_alive_s)
            name = asked.given_name or listed_name(model.info)
            return JSONResponse(OllamaSerializer(asked, kind, name).loaded(), headers=ignored_headers(asked))
    response = await respond(
        request,
        services,
        owner,
        asked,
        lambda info: OllamaSerializer(asked, kind, asked.given_name or listed_name(info)),
    )
    if asked.stream:
        response.headers["content-type"] = MEDIA_TYPE
    return response


@router.post("/api/embed", dependencies=[GUARDED])
async def embed(request: Request, services: Services, owner: Owner) -> Response:
    """Return an embedding of each text: the mean of its last hidden states, of length 1."""
    asked = await read_body(request, parse_embed, of_any_type=True)
    found, name = await _embeddings(request, services, owner, asked)
    nanoseconds = {
        "total_duration": round(NANOSECONDS * sum(usage.queue_ms + usage.prompt_ms for usage in found.usages)),
        "load_duration": 0,
        "prompt_eval_count": found.prompt_tokens,
    }
    body = {"model": name, "embeddings": found.vectors} | nanoseconds
    return await large_response(lambda: body, ignored_headers(asked))


@router.post("/api/embeddings", dependencies=[GUARDED])
async def embed_one(request: Request, services: Services, owner: Owner) -> Response:
    """Return the embedding of one text, in Ollama's older format."""
    asked = await read_body(request, parse_embedding, of_any_type=True)
    found, _ = await _embeddings(request, services, owner, asked)
    vector = found.vectors[0] if found.vectors else ()
    return await large_response(lambda: {"embedding": vector}, ignored_headers(asked))


async def _embeddings(
    request: Request, services: ApiServices, owner: str, asked: OllamaEmbedding
) -> tuple[Embeddings, str]:
    asked = replace(asked, model=plain_name(asked.given_name, services.shared.engine.default.info))
    found = await embeddings_of(request, services, owner, asked)
    return found, asked.given_name or listed_name(found.info)


@router.post("/api/pull", dependencies=[GUARDED])
@router.post("/api/push", dependencies=[GUARDED])
@router.post("/api/create", dependencies=[GUARDED])
@router.post("/api/copy", dependencies=[GUARDED])
@router.delete("/api/delete", dependencies=[GUARDED])
async def manage() -> Response:
    """Not supported: models are managed by the web page and the command line."""
    raise ApiError(400, "not_supported", "models are not managed by this API: use `notso pull` or the Models page")
