"""llama.cpp's own completion, whole or as a stream."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from notso.web.api.llama_cpp.request import parse_native_request, tokenized
from notso.web.api.llama_cpp.stream import NativeSerializer
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import Owner, read_body, respond, serving, with_prompt
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/completion")
@router.post("/completions")
async def completion(request: Request, services: Services, owner: Owner) -> Response:
    """Write a text on, as llama.cpp's server does: what spells a control token in it is that token. A client that
    leaves stops it, unless it sent X-Conversation-Id."""
    read = await read_body(request, parse_native_request)
    async with serving(services, read.model) as model:
        tokenize, detokenize = partial(model.engine.tokenize, special=True), model.engine.detokenize
        asked = await with_prompt(request, lambda: tokenized(read, tokenize, detokenize))
    return await respond(request, services, owner, asked, lambda info: NativeSerializer(asked, info))
