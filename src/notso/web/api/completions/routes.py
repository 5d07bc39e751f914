"""Plain completions: text written on, whole or as a stream."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from notso.web.api.completions.fields import parse_text_request, with_texts
from notso.web.api.completions.stream import TextSerializer
from notso.web.api.shared.completion import Completion, fingerprint, new_id
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import Owner, read_body, respond, serving, with_prompt
from notso.web.edge.access import guarded
from notso.web.engine.model_names import model_id

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/v1/completions")
async def completions(request: Request, services: Services, owner: Owner) -> Response:
    """Write a text on. A client that leaves stops it, unless it sent X-Conversation-Id."""
    asked = await read_body(request, parse_text_request)
    if asked.echo and not all(asked.texts):
        read = asked
        async with serving(services, asked.model) as model:
            asked = await with_prompt(request, lambda: with_texts(read, model.engine.detokenize))
    return await respond(
        request,
        services,
        owner,
        asked,
        lambda info: TextSerializer(asked, Completion(model_id(info), fingerprint(info), new_id("cmpl"))),
    )
