"""Routes of the engine API. The format may change with every release; the path has its version."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import Response, StreamingResponse

from notso.smollm3 import EngineError, NotsoError
from notso.web.api.engine.sessions import Asked, FrontEnds
from notso.web.api.shared.services import ApiServices
from notso.web.edge.access import FRONT_ENDS_ONLY, KeyRing, include_marked
from notso.web.engine.port import ChatEngine, PromptInput, RequestOptions, SamplingParams
from notso.web.engine.remote.engine_link import WIRE_PATH
from notso.web.engine.remote.wire_values import METHODS, packed, packed_error, types_of, unpacked
from notso.web.engine.running import OffLoop
from notso.web.values.errors import Problem
from notso.web.values.json_steps import json_bytes

logger = logging.getLogger("notso.web.api")

router = APIRouter(prefix=WIRE_PATH)

T = TypeVar("T")


def mount(app: FastAPI, services: ApiServices) -> None:
    """Serve front ends that have the engine's key."""
    app.state.front_ends = FrontEnds(services)
    app.state.engine_ring = KeyRing(services.shared.settings.engine_key)
    include_marked(app, router)


def front_ends(request: Request) -> FrontEnds:
    return cast(FrontEnds, request.app.state.front_ends)


Ends = Annotated[FrontEnds, Depends(front_ends)]


@router.post("/events", dependencies=[FRONT_ENDS_ONLY])
async def events(request: Request, ends: Ends) -> Response:
    """Stream all events of the front end's answers, and the engine's status, as JSON lines."""

    async def answer() -> Response:
        told = await _read(request, ends, _Resumed)
        session = ends.session(told.session)
        session.steer(told.stop, told.answer_now)
        return StreamingResponse(session.lines(told.read, told.pending, told.up_to), media_type="application/x-ndjson")

    return await _answered(answer)


@router.post("/submit", dependencies=[FRONT_ENDS_ONLY])
async def submit(request: Request, ends: Ends) -> Response:
    """Start an answer. Its events arrive in the stream."""

    async def answer() -> Response:
        told = await _read(request, ends, _Submitted)
        off_loop = _off_loop(request, ends)
        await ends.known(told.session).begin(told.number, told.asked, told.prepared, off_loop)
        return _told(True)

    return await _answered(answer)


@router.post("/prepare", dependencies=[FRONT_ENDS_ONLY])
async def prepare(request: Request, ends: Ends) -> Response:
    """Render a prompt for a later submission."""

    async def answer() -> Response:
        return _told(await ends.prepare(await _read(request, ends, _asked), _off_loop(request, ends)))

    return await _answered(answer)


@router.post("/steer", dependencies=[FRONT_ENDS_ONLY])
async def steer(request: Request, ends: Ends) -> Response:
    """End answers, or their reasoning."""

    async def answer() -> Response:
        told = await _read(request, ends, _Steered)
        ends.known(told.session).steer(told.stop, told.answer_now)
        return _told(True)

    return await _answered(answer)


@router.post("/call", dependencies=[FRONT_ENDS_ONLY])
async def call(request: Request, ends: Ends) -> Response:
    """Call a method of the engine."""

    async def answer() -> Response:
        name, arguments = await _read(request, ends, _called)
        running = ends.services.shared.requests.open("", counts=False)
        try:
            engine = await ends.load(running)
            if name == "clear_cache" and "owner" in arguments:  # any model may have cached the conversation
                await ends.services.shared.engine.clear_cache(**arguments)
                return _told(None)
            if name == "forget_reading":
                await ends.services.shared.engine.forget_reading(arguments["scope"], arguments["name"])
                return _told(None)
            work = partial(_result, engine, name, arguments)
            return await ends.services.shared.large_work.run(work, len(await request.body()), "")
        finally:
            running.close()

    return await _answered(answer)


def _result(engine: ChatEngine, name: str, arguments: dict[str, Any]) -> Response:
    result = packed(getattr(engine, name)(**arguments))
    return Response(json_bytes({"result": result}, allow_nan=True), media_type="application/json")


class _Steered:
    """Session, and answers to stop or to end the reasoning of."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.session = unpacked(str, given["session"])
        self.stop = unpacked(list[int], given.get("stop", []))
        self.answer_now = unpacked(list[int], given.get("answer_now", []))


class _Resumed(_Steered):
    """With read positions."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.read = {int(number): unpacked(int, count) for number, count in given["read"].items()}
        self.pending = frozenset(unpacked(list[int], given["pending"]))
        self.up_to = unpacked(int, given["up_to"])


class _Submitted:
    def __init__(self, given: dict[str, Any]) -> None:
        self.session = unpacked(str, given["session"])
        self.number = unpacked(int, given["number"])
        self.prepared = unpacked(str | None, given.get("prepared"))
        self.asked = _asked(given)


def _asked(given: dict[str, Any]) -> Asked:
    return Asked(
        unpacked(PromptInput, given["prompt"]),
        unpacked(SamplingParams, given["params"]),
        unpacked(RequestOptions, given["options"]),
    )


def _called(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = unpacked(str, given["method"])
    if name not in METHODS:
        raise ValueError("no method")
    return name, types_of(name).unpack(given["arguments"])


async def _read(request: Request, ends: FrontEnds, parse: Callable[[dict[str, Any]], T]) -> T:
    body = await request.body()
    return await ends.services.shared.large_work.run(lambda: parse(json.loads(body)), len(body), "")


def _off_loop(request: Request, ends: FrontEnds) -> OffLoop:
    async def off_loop(work: Callable[[], None]) -> None:
        await ends.services.shared.large_work.run(work, len(await request.body()), "")

    return off_loop


def _told(result: Any) -> Response:
    return _json({"result": result})


def _json(told: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(told), status, media_type="application/json")


async def _answered(answer: Callable[[], Awaitable[Response]]) -> Response:
    # Engine errors travel in the body; other statuses mean a protocol mismatch.
    try:
        return await answer()
    except NotsoError as error:
        return _json({"error": packed_error(error)})
    except Problem as problem:
        return _json({"error": packed_error(EngineError(problem.sentence))})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _json({"error": packed_error(EngineError("the front end sent an invalid request"))}, 400)
    except Exception:
        logger.exception("a front end's request failed")
        return _json({"error": packed_error(EngineError("the engine failed; see its log"))})
