"""Routes for the tokens of an answer: show them with alternatives, continue from a token, and download a receipt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from notso.web.chat.chat_view import read_branch
from notso.web.chat.submit import fork
from notso.web.chat.tokens import (
    SHOWN_TOKENS,
    alternatives,
    build_receipts,
    load_run_requests,
    require_trace,
    resolve_run,
    token_texts,
)
from notso.web.chat.views import Fields, FoundMessage, Page, find_chat, find_message, render_new_turn, render_page
from notso.web.edge.access import GUARDED, USES_MODEL
from notso.web.values.errors import Problem
from notso.web.values.ids import new_id
from notso.web.values.wording import words

router = APIRouter(prefix="/chats/{chat_id}/messages/{message_id}")

MAX_TYPED_CHARACTERS = 1_000


@router.get("/tokens", dependencies=[USES_MODEL])
async def show_tokens(
    page: Page, chat_id: str, message_id: str, run: int | None = None, at: int | None = None, first: int | None = None
) -> Response:
    """Show an answer's tokens and, if `at` is given, the alternatives at that position.

    Returns JSON if the request has an Accept header without text/html.
    """
    # Tool calls divide an answer into runs, numbered from 0; the default of `run` is the last run.
    services, owner = page.services, page.owner
    chat = await find_chat(page, chat_id)
    message = await find_message(page, chat_id, message_id)
    trace = await require_trace(services, owner, message)
    number = resolve_run(trace, run, at or 0)
    engine, requests = await load_run_requests(services, owner, message, trace)
    start = (at or 0) // SHOWN_TOKENS * SHOWN_TOKENS if first is None else max(0, first)
    texts = await token_texts(engine, trace.runs[number], start)
    others = await alternatives(services, requests[number], trace.runs[number], at) if at is not None else []
    shown: dict[str, Any] = {
        "run": number,
        "runs": len(trace.runs),
        "first": start,
        "total": len(trace.runs[number].ids),
        "at": at,
    }
    if "text/html" not in page.request.headers.get("accept", "text/html"):
        ids = trace.runs[number].ids[start : start + SHOWN_TOKENS]
        tokens = [{"id": id, "text": text} for id, text in zip(ids, texts, strict=True)]
        return JSONResponse(shown | {"tokens": tokens, "alternatives": [asdict(each) for each in others]})
    written = trace.runs[number].ids[at] if at is not None else None
    shown |= {"texts": texts, "alternatives": others, "written": written, "shown_tokens": SHOWN_TOKENS}
    shown |= {"message": message, "key": new_id()}
    return await render_page(page, "tokens.html", chat=chat, **shown)


@router.post("/fork", dependencies=[USES_MODEL])
async def fork_message(page: Page, fields: Fields, message: FoundMessage) -> Response:
    """Generate another version of an answer, in which a token id (`token`) or text (`text`) replaces the token at
    position `at` of the run numbered `run`."""
    services, owner = page.services, page.owner
    trace = await require_trace(services, owner, message)
    place, token, typed = _number(fields, "at"), _number(fields, "token"), fields.get("text", "")
    if place is None or (token is None) == (typed == "") or len(typed) > MAX_TYPED_CHARACTERS:
        raise Problem(400, words["error_form"])
    number = resolve_run(trace, _number(fields, "run"), place)
    if token is None:
        engine, _ = await load_run_requests(services, owner, message, trace)
        replacement = tuple(await asyncio.to_thread(engine.tokenize, typed))
    else:
        replacement = (token,)
    view = await read_branch(services, owner, message.chat_id, message.parent_id or "")
    accepted, view = await fork(services, owner, view, message, trace, (number, place), replacement, fields)
    return await render_new_turn(page, view, accepted)


@router.get("/receipt", dependencies=[GUARDED])
async def receipt(page: Page, chat_id: str, message_id: str, form: Literal["open", "sealed"] = "open") -> Response:
    """Download the receipt of an answer, which can be checked with `notso verify --receipt`."""
    message = await find_message(page, chat_id, message_id)
    receipts = await build_receipts(page.services, page.owner, message, sealed=form == "sealed")
    text = await asyncio.to_thread(json.dumps, receipts, indent=1)
    name = f"receipt-{message.id[:8]}-{form}.json"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="application/json", headers=headers)


def _number(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise Problem(400, words["error_form"])
    return int(text)
