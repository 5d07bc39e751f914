"""Show the tokens of an answer with alternatives, continue from a token, and download a receipt.

A receipt records what is needed to reproduce an answer; a sealed one has hashes in place of the text. A trace records
how an answer was generated. Tool calls divide an answer into runs, one per request to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from notso.smollm3 import ModelError, Replay, TokenLogprob
from notso.web.chat.chat_view import read_branch_above, require
from notso.web.chat.services import ChatServices, ChatUser, engine_and_registry
from notso.web.chat.submit import build_request, fork
from notso.web.chat.views import Fields, FoundMessage, Page, find_chat, find_message, render_new_turn, render_page
from notso.web.edge.access import GUARDED, USES_MODEL
from notso.web.engine.model_names import resolve_model_choice
from notso.web.engine.port import ChatEngine, Request
from notso.web.engine.running import submissions_for
from notso.web.store.protocol import AnswerRun, AnswerTrace, StoredMessage
from notso.web.turns.answer_trace import replay_request
from notso.web.values.errors import Problem
from notso.web.values.ids import new_id
from notso.web.values.wording import words

ALTERNATIVES = 20
SHOWN_TOKENS = 2_000
"""Maximum number of tokens on one page."""


@dataclass(frozen=True, slots=True)
class Alternative:
    id: int
    text: str
    probability: float  # before temperature and sampling filters are applied


async def require_trace(user: ChatUser, message: StoredMessage) -> AnswerTrace:
    """Return the trace of an answer. Raises Problem (409) if it is missing, empty or unfinished."""
    trace = await user.store.trace(user.owner, message.id)
    if trace is None or message.active or not any(run.ids for run in trace.runs):
        raise Problem(409, words["error_no_tokens"])
    return trace


async def load_run_requests(
    user: ChatUser, message: StoredMessage, trace: AnswerTrace
) -> tuple[ChatEngine, list[Request]]:
    """Load an answer's model; return its engine and the request of each run. Raises Problem."""
    view = (await read_branch_above(user, message)).with_settings(trace.own)
    choice = await resolve_model_choice(*engine_and_registry(user.services), trace.model)
    try:
        with contextlib.closing(user.services.shared.requests.open(user.owner, counts=False)) as running:
            engine = require(await running.load(choice.model), words["error_stopping"], 503)
    except ModelError as error:
        raise Problem(503, words["error_not_loaded"].format(reason=error)) from error
    await user.services.toolbox.ready(view.settings.tool_names)
    request, _ = await build_request(user, view, choice, message)
    keep_thinking = view.settings.keep_thinking
    return engine, [replay_request(run, request, message, keep_thinking=keep_thinking) for run in trace.runs]


async def token_texts(engine: ChatEngine, run: AnswerRun, first: int) -> list[str]:
    ids = run.ids[first : first + SHOWN_TOKENS]
    return [each.decode("utf-8", "replace") for each in await asyncio.to_thread(engine.token_bytes, ids)] if ids else []


def resolve_run(trace: AnswerTrace, number: int | None, place: int) -> int:
    """Return a run's number; None selects the last run. Raises Problem (400) if the run or token does not exist."""
    number = len(trace.runs) - 1 if number is None else number
    if not 0 <= number < len(trace.runs) or not 0 <= place < len(trace.runs[number].ids):
        raise Problem(400, words["error_form"])
    return number


async def alternatives(services: ChatServices, request: Request, run: AnswerRun, place: int) -> list[Alternative]:
    """Return the likeliest tokens at `place`, including the one that the sampler chooses, with their probabilities.

    The sampler chooses the generated token, unless the user replaced it; a replacement is listed only if it is likely.
    The list is empty for a token that the server inserted to end the reasoning. Raises Problem (409) if the engine
    cannot repeat the request.
    """
    params = replace(request.params, max_tokens=place + 1, min_tokens=0)
    replay = Replay(run.ids[:place], tuple(at for at in run.closed_at if at < place), run.origin)
    options = replace(request.options, token_ids=False, top_logprobs=ALTERNATIVES, replay=replay)
    probe = replace(request, params=params, options=options)
    tokens: list[TokenLogprob] = []
    try:
        with contextlib.closing(services.shared.requests.open(options.owner, counts=False)) as running:
            await running.begin(submissions_for(probe), model=request.model)
            async for _, events in running.events():
                for event in events:
                    if event.error is not None:
                        raise event.error
                    tokens += event.logprobs
    except ModelError as error:
        raise Problem(409, words["error_fork"]) from error
    if not tokens or not tokens[0].top:
        return []
    candidates = {each.id: each for each in (*tokens[0].top, tokens[0])}
    ranked = sorted(candidates.values(), key=lambda each: -each.logprob)
    return [Alternative(each.id, each.text, math.exp(each.logprob)) for each in ranked]


async def build_receipts(
    user: ChatUser, message: StoredMessage, *, sealed: bool
) -> Mapping[str, Any] | list[Mapping[str, Any]]:
    """Return the receipt of an answer, or a list of receipts if it has several runs. Raises Problem."""
    trace = await require_trace(user, message)
    engine, requests = await load_run_requests(user, message, trace)
    try:
        receipts = [
            await asyncio.to_thread(engine.receipt, each.messages, each.params, each.options, sealed=sealed)
            for each in requests
        ]
    except ModelError as error:
        raise Problem(409, words["error_fork"]) from error
    return receipts[0] if len(receipts) == 1 else receipts


router = APIRouter(prefix="/chats/{chat_id}/messages/{message_id}")

MAX_TYPED_CHARACTERS = 1_000


@router.get("/tokens", dependencies=[USES_MODEL])
async def show_tokens(
    page: Page, chat_id: str, message_id: str, run: int | None = None, at: int | None = None, first: int | None = None
) -> Response:
    """Show an answer's tokens and, if `at` is given, the alternatives at that position.

    Returns JSON if the request has an Accept header without text/html.
    """
    # Runs are numbered from 0; `run` defaults to the last one.
    chat = await find_chat(page, chat_id)
    message = await find_message(page, chat_id, message_id)
    trace = await require_trace(page, message)
    number = resolve_run(trace, run, at or 0)
    engine, requests = await load_run_requests(page, message, trace)
    start = (at or 0) // SHOWN_TOKENS * SHOWN_TOKENS if first is None else max(0, first)
    texts = await token_texts(engine, trace.runs[number], start)
    others = await alternatives(page.services, requests[number], trace.runs[number], at) if at is not None else []
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
    trace = await require_trace(page, message)
    place, token, typed = _number(fields, "at"), _number(fields, "token"), fields.get("text", "")
    if place is None or (token is None) == (typed == "") or len(typed) > MAX_TYPED_CHARACTERS:
        raise Problem(400, words["error_form"])
    number = resolve_run(trace, _number(fields, "run"), place)
    if token is None:
        engine, _ = await load_run_requests(page, message, trace)
        replacement = tuple(await asyncio.to_thread(engine.tokenize, typed))
    else:
        replacement = (token,)
    accepted, view = await fork(page, message, trace, (number, place), replacement, fields)
    return await render_new_turn(page, view, accepted)


@router.get("/receipt", dependencies=[GUARDED])
async def receipt(page: Page, chat_id: str, message_id: str, form: Literal["open", "sealed"] = "open") -> Response:
    """Download the receipt of an answer, which can be checked with `notso verify --receipt`."""
    message = await find_message(page, chat_id, message_id)
    receipts = await build_receipts(page, message, sealed=form == "sealed")
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
