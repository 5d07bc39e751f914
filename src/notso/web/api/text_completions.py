"""Plain completions: text written on, whole or as a stream."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from notso.web.access import guarded
from notso.web.api.chat_response import Completion, fingerprint, model_id, new_id
from notso.web.api.serving import Owner, Shared, answer, read_body
from notso.web.api.text_fields import parse_text_request
from notso.web.api.text_form import TextForm

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/v1/completions")
async def completions(request: Request, state: Shared, owner: Owner) -> Response:
    """Write a text on. A client that leaves stops it, unless it sent X-Conversation-Id."""
    asked = await read_body(request, parse_text_request)
    return await answer(
        request,
        state,
        owner,
        asked,
        lambda info: TextForm(asked, Completion(model_id(info), fingerprint(info), new_id("cmpl"))),
    )
