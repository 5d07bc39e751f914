"""The OpenAI API: chat completions, whole or as a stream, and the models there are."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from notso.smollm3 import Event, ModelInfo
from notso.web.access import guarded, owner_of
from notso.web.api.api_error import ApiError, api_error_of
from notso.web.api.chat_request import ChatRequest, parse_chat_request
from notso.web.api.chat_response import Choice, Completion, fingerprint, model_id, timings
from notso.web.api.model_names import names_of, require_model
from notso.web.api.running import RunningAnswers
from notso.web.api.strict_json import parse_object
from notso.web.chat.engine_port import ChatEngine
from notso.web.state import State, state_of

logger = logging.getLogger("notso.web.api")

router = APIRouter(dependencies=[Depends(guarded)])

Owner = Annotated[str, Depends(owner_of)]
Shared = Annotated[State, Depends(state_of)]

LONGEST_RETRY_SECONDS = 60
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@router.get("/v1/models")
async def list_models(state: Shared) -> Response:
    """The model that answers; none while it loads."""
    info = state.engine.info
    data = [await asyncio.to_thread(_model_entry, info)] if info is not None else []
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def show_model(state: Shared, name: str) -> Response:
    """The model that answers, by any of its names."""
    info = _ready(state)[1]
    require_model(name, info)
    return JSONResponse(await asyncio.to_thread(_model_entry, info))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, state: Shared, owner: Owner) -> Response:
    """Answer a conversation. A client that leaves stops its answer."""
    asked = await _read(request)
    engine, info = _ready(state)
    require_model(asked.model, info)
    if len(asked.params) > info.max_num_seqs:
        raise ApiError(400, "invalid_value", f"n is at most {info.max_num_seqs} on this server", param="n")
    _admit(state, engine)
    answers = RunningAnswers(engine, asked, secrets.token_hex(16) if asked.fresh else owner, state.answers)
    completion = Completion(model_id(info), fingerprint(info))
    try:
        await answers.start()  # all that can be refused is refused before the first byte
        if asked.stream:
            return _AnswerStream(_chunks(answers, asked, completion, state), answers)
        return JSONResponse(completion.body(await _unless_gone(request, answers, state)))
    except ApiError:
        raise
    except Exception as error:
        raise _known(error) from error


async def _read(request: Request) -> ChatRequest:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "unsupported_media_type", "the body must be application/json")
    body = await request.body()
    return await asyncio.to_thread(lambda: parse_chat_request(parse_object(body)))


def _ready(state: State) -> tuple[ChatEngine, ModelInfo]:
    engine, info = state.engine.engine, state.engine.info
    if state.stopping:
        raise ApiError(503, "shutting_down", "the server is stopping", retry_after_seconds=5)
    if engine is not None and info is not None:
        return engine, info
    if state.engine.failure:
        raise ApiError(503, "model_failed", f"no model can answer: {state.engine.failure}", retry_after_seconds=60)
    raise ApiError(503, "model_loading", "the model is being loaded", retry_after_seconds=5)


def _admit(state: State, engine: ChatEngine) -> None:
    """Raises ApiError (429) where too many wait already, with the time after which it is worth asking again."""
    stats = engine.stats()
    if stats.waiting < state.settings.max_waiting_turns:
        return
    rounds = math.ceil(stats.waiting / engine.info.max_num_seqs)
    seconds = min(LONGEST_RETRY_SECONDS, math.ceil(rounds * state.metrics.mean_answer_seconds))
    raise ApiError(429, "queue_full", "too many requests are waiting", retry_after_seconds=max(1, seconds))


async def _unless_gone(request: Request, answers: RunningAnswers, state: State) -> list[Choice]:
    """The whole answer, or nothing to anybody if the client leaves meanwhile."""
    writing = asyncio.create_task(answers.whole(lambda choice: _count(state, choice)))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise ApiError(499, "client_left", "the client left")
        return writing.result()
    finally:
        for task in (writing, leaving):
            task.cancel()
        answers.stop()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _AnswerStream(StreamingResponse):
    """Stops the answers when it ends, also if it ends before its first chunk: a generator would not hear of that."""

    def __init__(self, chunks: AsyncIterator[bytes], answers: RunningAnswers) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.stop()


async def _chunks(
    answers: RunningAnswers, asked: ChatRequest, completion: Completion, state: State
) -> AsyncIterator[bytes]:
    """Chunks, exactly one finish for each choice, and [DONE]; or one error in their place."""
    try:
        for number in range(len(answers.choices)):
            yield _data(completion.chunk(number, {"role": "assistant", "content": ""}))
        async for item in answers.events():
            if item is None:
                yield PING
                continue
            number, event = item
            choice = answers.choices[number]
            delta = choice.add(event)
            if delta is not None:
                yield _data(completion.chunk(number, delta))
            elif event.kind == "progress" and asked.return_progress:
                yield _data(completion.chunk(number, {}, prompt_progress=_progress(event)))
            if event.kind == "end":
                _count(state, choice)
                yield _data(completion.chunk(number, {}, choice.reason, timings=timings([choice])))
        if asked.include_usage:
            yield _data(completion.usage_chunk(answers.choices))
        yield DONE
    except Exception as error:
        yield _data(json.dumps(_known(error).body, ensure_ascii=False))


def _count(state: State, choice: Choice) -> None:
    state.metrics.observe(choice.usage, choice.finish_reason)


def _known(error: Exception) -> ApiError:
    mapped = api_error_of(error)
    if mapped.code == "internal_error":
        logger.error("unexpected %s on an API request", type(error).__name__, exc_info=error)
    return mapped


def _progress(event: Event) -> dict[str, Any]:
    progress = event.progress
    if progress is None:
        return {}
    computed = progress.done_tokens - progress.cached_tokens
    spent_ms = 1000 * computed / progress.tokens_per_s if progress.tokens_per_s else 0
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.done_tokens,
        "time_ms": round(spent_ms),
    }


def _data(text: str) -> bytes:
    # JSON has no bare line ends, so that a chunk is one line of the stream whatever the model wrote.
    return b"data: " + text.encode() + b"\n\n"


def _model_entry(info: ModelInfo) -> dict[str, Any]:
    path = Path(info.path)
    return {
        "id": model_id(info),
        "object": "model",
        "created": int(path.stat().st_mtime) if info.path and path.exists() else 0,
        "owned_by": "notso",
        "aliases": sorted(names_of(info) - {model_id(info)}),
        "meta": {
            "n_ctx": info.context_tokens,
            "n_params": info.parameter_count,
            "size": info.size_bytes,
            "demo": info.is_demo,
        },
    }
