"""Responses that survive a restart: background responses, and streams with X-Conversation-Id and `store`.

Until such a response ends, its request, seed and tokens are stored in the database. If its process stops, another
process continues the response under the same id: it sends the request again and replays the stored tokens. Clients
receive the same events as without the interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Scope

from notso.smollm3 import NotsoError, Replay
from notso.web.api.shared.receipts import with_seed_and_token_ids
from notso.web.api.shared.resumable import ResumableStream
from notso.web.edge.access import INSIDE, Caller, KeyRing, caller_of
from notso.web.edge.access_log import AccessLog
from notso.web.edge.errors import ApiEdge, ApiError
from notso.web.engine.running import Submission
from notso.web.services import SharedServices
from notso.web.store.protocol import StoredResponse
from notso.web.store.records import UnfinishedResponse

RETRY_STATUSES = frozenset({429, 503})
LONGEST_RETRY_SECONDS = 30


def internal_scope(app: FastAPI | None, path: str, caller: Caller) -> Scope:
    """Return the ASGI scope of an internal JSON POST request on behalf of `caller`."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "state": {},
        INSIDE: caller,
    }


async def send_internal_with_retry(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, bytes]:
    """Send an internal request, retrying while the server is busy; return status and body."""
    while True:
        status, headers, answer = await send_internal(app, {**scope, "state": {}}, body)
        if status not in RETRY_STATUSES:
            return status, answer
        wait_s = headers.get("retry-after", "")
        await asyncio.sleep(min(LONGEST_RETRY_SECONDS, max(1, int(wait_s) if wait_s.isdecimal() else 1)))


async def send_internal(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, dict[str, str], bytes]:
    status, headers, pieces = 500, dict[str, str](), list[bytes]()
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(pieces)


LEFT = "notso.left"
"""ASGI scope key of a request that continues the response of a stopped process. The value is an UnfinishedResponse."""
CREATED = "notso.created"
"""ASGI scope key of the creation time of a request's response, in milliseconds."""
KEPT_HEADERS = ("x-conversation-id", "x-notso-receipt")
LOOK_SECONDS = 20.0
"""Interval between searches for responses of stopped processes."""
NOTE_SECONDS = 1.0
"""Interval at which the tokens of a running response are stored."""
_log = logging.getLogger("notso.web.api")


class BackgroundResponses:
    """Runs background responses and continues those of stopped processes. Use only on the event loop."""

    def __init__(self, shared: SharedServices, ring: KeyRing) -> None:
        self._shared = shared
        self._ring = ring
        self._holder = secrets.token_hex(8)
        self._known: set[str] = set()  # ids of the responses that this process is generating
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, app: FastAPI, inside: Any) -> None:
        self._start_task(self._claim_responses(app, AccessLog(ApiEdge(inside))))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(NotsoError):  # the database is unreachable; the leases will expire
            await self._shared.store.records.release_unfinished_responses(self._holder)

    async def persist(self, request: Request, owner: str, response_id: str, seed: int, stream: ResumableStream) -> None:
        """Store a running response with its tokens, and remove it at its end."""
        self._known.add(response_id)
        if LEFT not in request.scope:
            body, caller = (await request.body()).decode(), json.dumps(astuple(caller_of(request)))
            headers = {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}
            left = UnfinishedResponse(
                response_id,
                owner,
                body,
                caller,
                seed,
                created_ms(request),
                path=request.url.path if request.url.path.startswith("/v1/") else f"/v1{request.url.path}",
                headers=json.dumps(headers),
                conversation=headers.get("x-conversation-id", ""),
            )
            await self._shared.store.records.add_unfinished_response(left, self._holder)
        self._start_task(self._save_progress(response_id, stream))
        stream.following.add_done_callback(lambda _: self._start_task(self._on_end(owner, response_id, stream)))

    async def _save_progress(self, response_id: str, stream: ResumableStream) -> None:
        record = stream.record
        if record is None:
            return
        begun, stored, noted = record.begun, record.begun, ("", record.begun)
        while not (await asyncio.wait([stream.following], timeout=NOTE_SECONDS))[0]:
            if noted == (record.origin, record.tokens):
                continue
            now, progress = (record.origin, record.tokens), json.dumps(asdict(record.since(stored)))
            with contextlib.suppress(NotsoError):  # the database is unreachable; the next round tries again
                is_further, records = record.tokens > begun, self._shared.store.records
                await records.save_progress(response_id, self._holder, stored, progress, is_further=is_further)
                noted, stored = now, now[1]

    async def _on_end(self, owner: str, response_id: str, stream: ResumableStream) -> None:
        is_whole = stream.record is not None and stream.record.finish not in (None, "cancelled")
        if self._shared.stopping and not is_whole and not stream.running.stopped_by_asker:
            return  # keep it stored: another process will continue it
        while True:
            with contextlib.suppress(NotsoError):  # the database is unreachable; try again below
                await self._shared.store.records.delete_unfinished_response(owner, response_id)
                self._known.discard(response_id)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _claim_responses(self, app: FastAPI, inside: Any) -> None:
        records, is_shared = self._shared.store.records, self._shared.store.is_shared
        while True:
            with contextlib.suppress(NotsoError):  # the database is unreachable; the next round tries again
                if is_shared:
                    await records.renew_unfinished_responses(self._holder, _now_ms())
                # If no other server shares the store, all leases belong to earlier processes and count as expired.
                until = _now_ms() if is_shared else 1 << 62
                while not self._shared.stopping and (left := await self._claim_next(until)):
                    self._known.add(left.id)
                    self._start_task(self._continue_claimed(app, inside, left))
            await asyncio.sleep(LOOK_SECONDS)

    async def _claim_next(self, until_ms: int) -> UnfinishedResponse | None:
        return await self._shared.store.records.claim_unfinished_response(self._holder, sorted(self._known), until_ms)

    async def _continue_claimed(self, app: FastAPI, inside: Any, left: UnfinishedResponse) -> None:
        try:
            await self._continue_response(app, inside, left)
        except BaseException:
            self._known.discard(left.id)  # so that it can be claimed again
            raise

    async def _continue_response(self, app: FastAPI, inside: Any, left: UnfinishedResponse) -> None:
        caller = await self._ring.with_current_key(Caller(*json.loads(left.caller)))
        if caller is None or left.has_used_all_tries:
            said = "the key was revoked" if caller is None else "the server stopped several times during this response"
            return await self._fail(left, ApiError(500, "server_error", said))
        status, told = await self._repeat_request(app, inside, left, caller)
        if told.get("param") == "replay" and not json.loads(left.body).get("stream"):
            # The tokens cannot be replayed, because the model or its arithmetic has changed. No client has seen a part
            # of this response, because it is not streamed, so it can start from the beginning.
            status, told = await self._repeat_request(app, inside, replace(left, progress=""), caller)
        if status != 200:
            message = str(told.get("message", "the response could not be continued"))
            await self._fail(left, ApiError(500, str(told.get("code", "server_error")), message))
        return None

    async def _repeat_request(
        self, app: FastAPI, inside: Any, left: UnfinishedResponse, caller: Caller
    ) -> tuple[int, Mapping[str, Any]]:
        scope: Scope = {**internal_scope(app, left.path, caller), LEFT: left}
        scope["headers"] += [(name.encode(), value.encode()) for name, value in json.loads(left.headers).items()]
        status, answer = await send_internal_with_retry(inside, scope, left.body.encode())
        return status, json.loads(answer or b"{}").get("error", {}) if status != 200 else {}

    async def _fail(self, left: UnfinishedResponse, error: ApiError) -> None:
        _log.warning("a response could not be continued: %s", error.message)
        body = queued_body(left) | {"status": "failed", "error": {"code": error.code, "message": error.message}}
        store = self._shared.store
        if not left.conversation:
            await store.save_response(left.owner, StoredResponse(left.id, None, body, (), left.created_ms))
        await store.records.delete_unfinished_response(left.owner, left.id)
        self._known.discard(left.id)

    def _start_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a response could not be stored or continued", exc_info=error)


def queued_body(left: UnfinishedResponse) -> dict[str, Any]:
    """Return the body of a response that is waiting to be continued by another process."""
    return {
        "id": left.id,
        "object": "response",
        "created_at": left.created_ms // 1000,
        "status": "queued",
        "error": None,
        "background": True,
        "output": [],
        "usage": None,
    }


def with_replay(submission: Submission, left: UnfinishedResponse | None) -> Submission:
    """Return a copy of `submission` that reports token ids and replays the tokens of `left`, if any."""
    submission = with_seed_and_token_ids(submission, left.seed if left is not None else None)
    if left is None or not left.progress:
        return submission
    told = json.loads(left.progress)
    replay = Replay(tuple(told["ids"]), tuple(told["closed_at"]), told["origin"])
    return replace(submission, options=replace(submission.options, replay=replay))


def resumed_response(request: Request) -> UnfinishedResponse | None:
    left: UnfinishedResponse | None = request.scope.get(LEFT)
    return left


def created_ms(request: Request) -> int:
    """Return the creation time of the request's response, which is the same at each call and after a restart."""
    left = resumed_response(request)
    return left.created_ms if left is not None else int(request.scope.setdefault(CREATED, _now_ms()))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
