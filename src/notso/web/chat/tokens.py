"""Tokens of an answer with the alternatives at each position, and receipts of answers.

A receipt records what is needed to reproduce an answer; a sealed one has hashes in place of the text. A trace records
how an answer was generated. Tool calls divide an answer into runs, one per request to the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from notso.web.chat.chat_view import read_branch
from notso.web.chat.services import ChatServices, engine_and_registry
from notso.web.chat.submit import build_request
from notso.web.engine.model_names import resolve_model_choice
from notso.web.engine.port import ChatEngine, ModelError, Replay, Request, TokenLogprob
from notso.web.engine.running import submissions_for
from notso.web.store.protocol import AnswerRun, AnswerTrace, StoredMessage
from notso.web.turns.answer_trace import replay_request
from notso.web.values.errors import Problem
from notso.web.values.wording import words

ALTERNATIVES = 20
SHOWN_TOKENS = 2_000
"""Maximum number of tokens on one page."""


@dataclass(frozen=True, slots=True)
class Alternative:
    id: int
    text: str
    probability: float  # before temperature and sampling filters


async def require_trace(services: ChatServices, owner: str, message: StoredMessage) -> AnswerTrace:
    """Return the trace of an answer. Raises Problem (409) if it is missing, empty or unfinished."""
    trace = await services.shared.store.trace(owner, message.id)
    if trace is None or message.active or not any(run.ids for run in trace.runs):
        raise Problem(409, words["error_no_tokens"])
    return trace


async def load_run_requests(
    services: ChatServices, owner: str, message: StoredMessage, trace: AnswerTrace
) -> tuple[ChatEngine, list[Request]]:
    """Load an answer's model; return its engine and the request of each run. Raises Problem."""
    view = await read_branch(services, owner, message.chat_id, message.parent_id or "")
    choice = await resolve_model_choice(*engine_and_registry(services), trace.model)
    running = services.shared.requests.open(owner, counts=False)
    try:
        engine = await running.load(choice.model)
    except ModelError as error:
        raise Problem(503, words["error_not_loaded"].format(reason=error)) from error
    finally:
        running.close()
    if engine is None:
        raise Problem(503, words["error_stopping"])
    await services.toolbox.ready(view.settings.tool_names)
    request, _ = await build_request(services, owner, view, choice, message.kind)
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


def replay_until(run: AnswerRun, place: int) -> Replay:
    return Replay(run.ids[:place], tuple(at for at in run.closed_at if at < place), run.origin)


async def alternatives(services: ChatServices, request: Request, run: AnswerRun, place: int) -> list[Alternative]:
    """Return the likeliest tokens at `place`, including the generated one, with their probabilities.

    The list is empty for a token that the server inserted to end the reasoning. Raises Problem (409) if the engine
    cannot repeat the request.
    """
    params = replace(request.params, max_tokens=place + 1, min_tokens=0)
    options = replace(request.options, token_ids=False, top_logprobs=ALTERNATIVES, replay=replay_until(run, place))
    probe = replace(request, params=params, options=options)
    running = services.shared.requests.open(options.owner, counts=False)
    tokens: list[TokenLogprob] = []
    try:
        await running.begin(submissions_for(probe), model=request.model)
        async for _, events in running.events():
            for event in events:
                if event.error is not None:
                    raise event.error
                tokens += event.logprobs
    except ModelError as error:
        raise Problem(409, words["error_fork"]) from error
    finally:
        running.close()
    if not tokens or not tokens[0].top:
        return []
    candidates = {each.id: each for each in (*tokens[0].top, tokens[0])}
    ranked = sorted(candidates.values(), key=lambda each: -each.logprob)
    return [Alternative(each.id, each.text, math.exp(each.logprob)) for each in ranked]


async def build_receipts(
    services: ChatServices, owner: str, message: StoredMessage, *, sealed: bool
) -> Mapping[str, Any] | list[Mapping[str, Any]]:
    """Return the receipt of an answer, or a list of receipts if it has several runs. Raises Problem."""
    trace = await require_trace(services, owner, message)
    engine, requests = await load_run_requests(services, owner, message, trace)
    try:
        receipts = [
            await asyncio.to_thread(engine.receipt, each.messages, each.params, each.options, sealed=sealed)
            for each in requests
        ]
    except ModelError as error:
        raise Problem(409, words["error_fork"]) from error
    return receipts[0] if len(receipts) == 1 else receipts
