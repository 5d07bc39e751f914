"""Answer a repeated Idempotency-Key with the stored response to the first request, for 24 hours, on any replica."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.smollm3 import NotsoError
from notso.web.api.request_fields.fields import invalid_field
from notso.web.api.shared.background import receive_once
from notso.web.api.shared.resumable import (
    PING_SECONDS,
    SILENT_SECONDS,
    AnswerLog,
    RemoteAnswer,
    RemoteAnswers,
    claim_name,
    replica_stopped_error,
)
from notso.web.api.shared.serializer import as_api_error
from notso.web.api.shared.services import ApiServices
from notso.web.api.shared.serving import INCOMPLETE, wait_for_disconnect
from notso.web.edge.access import KeyRing
from notso.web.edge.errors import ApiError, api_error_of, is_api
from notso.web.edge.forms import multipart_boundary
from notso.web.edge.limits import RELEASE_BODY
from notso.web.store.records import IdempotentResponse
from notso.web.values.durations import current_ms

HEADER, REPEATED = "idempotency-key", "idempotent-replayed"
MAX_STORED_BYTES = 16 * 1024 * 1024
"""Maximum size of a stored response; larger ones are delivered, but not stored."""
NOT_STORED = ("content-length", "x-request-id", "date", "server")
"""Response headers that are not stored, because each delivery has its own."""
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_log = logging.getLogger("notso.web.api")


@dataclass(slots=True)
class _Recording:
    # A response in progress, which any number of clients may follow in `log`. The first entry of the log contains the
    # status and the headers; the others are pieces of the body.

    key: tuple[str, str]  # owner and Idempotency-Key
    digest: bytes  # of the request
    log: AnswerLog
    replayed: bool = False  # whether the response was generated for an earlier request
    task: asyncio.Task[None] | None = None


class IdempotencyMiddleware:
    """Innermost ASGI middleware. Completes requests with Idempotency-Key even if the client disconnects.

    Stores only successful, complete responses.
    """

    def __init__(self, app: ASGIApp, services: ApiServices) -> None:
        self._app = services.inner_app = app
        self._services = services
        self._running: dict[tuple[str, str], _Recording] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not is_api(scope):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        keys = request.headers.getlist(HEADER)
        key_ring: KeyRing = scope["app"].state.key_ring
        try:
            caller = await key_ring.caller(request) if keys else None
        except NotsoError:  # the route authenticates again and reports the error
            caller = None
        if caller is None:  # no Idempotency-Key, or a caller that the route will reject
            await self._app(scope, receive, send)
            return
        try:
            if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
                raise invalid_field(HEADER, "Idempotency-Key must be 1 to 255 printable ASCII characters")
            scope.pop(RELEASE_BODY, None)  # this middleware keeps the body in memory until the response ends
            request.state.caller = caller  # so that the body counts against this owner's limit
            message = await receive()
            if message["type"] != "http.request":
                return
            await self._respond(scope, message, receive, send, (caller.owner, keys[0]))
        except (ApiError, NotsoError) as error:
            await _error_response(api_error_of(error), scope)(scope, receive, send)

    async def _respond(
        self, scope: Scope, message: Message, receive: Receive, send: Send, key: tuple[str, str]
    ) -> None:
        digest = await asyncio.to_thread(_request_digest, scope, message["body"])
        recording = self._running.get(key)
        repeated = recording is not None
        if recording is None:
            recording = self._running[key] = _Recording(key, digest, AnswerLog(digest.hex()))
            recording.task = asyncio.create_task(self._record(recording, scope, message))
        if recording.digest != digest:
            raise _key_reused_error()
        await _deliver(recording.log, receive, send, lambda: repeated or recording.replayed)

    async def _record(self, recording: _Recording, scope: Scope, message: Message) -> None:
        log = recording.log
        try:
            if not await self._replay(recording):
                await self._run(recording, scope, message)
        except Exception as error:
            failure = as_api_error(error)
            if log.sse_events:
                log.finish({"failed": True})
                return
            response = _error_response(failure, scope)
            await response(scope, receive_once(message), partial(_record_message, log))
        finally:
            if not log.finished:
                log.finish({})
            del self._running[recording.key]

    async def _replay(self, recording: _Recording) -> bool:
        # Returns False if the response is not stored yet. Another replica may still be generating it.
        stored = await self._services.shared.store.records.idempotent_response(*recording.key, current_ms())
        if stored is None:
            return False
        if stored.digest != recording.digest:
            raise _key_reused_error()
        recording.replayed = True
        recording.log.add((_start(stored.status, [list(each) for each in stored.headers]), stored.body))
        return True

    async def _run(self, recording: _Recording, scope: Scope, message: Message) -> None:
        exchange, claim = self._services.shared.exchange, claim_name(*_claim_key(*recording.key))
        if holder := await exchange.claim(claim, f"{recording.digest.hex()} {secrets.token_hex(8)}"):
            if holder.partition(" ")[0] != recording.digest.hex():
                raise _key_reused_error()
            found = await RemoteAnswers(exchange).find(*_claim_key(*recording.key))
            if found is not None:
                recording.replayed = True
                await _copy(found, recording.log)
                return
            if await self._replay(recording):  # the other replica has just stored the response
                return
            detail = "the first request with this key is being answered"
            raise ApiError(409, "generation_in_progress", detail, retry_after_seconds=1)
        try:
            # Look again: another replica may have stored the response between the first lookup and the claim.
            if exchange.is_shared and await self._replay(recording):
                return
            if exchange.is_shared:
                exchange.publish(claim, recording.log)
            await self._app(scope, receive_once(message), partial(_record_message, recording.log))
            if recording.log.sse_events and not scope.get(INCOMPLETE):
                await self._store_answer(recording)
        finally:
            exchange.release(claim)

    async def _store_answer(self, recording: _Recording) -> None:
        first, *pieces = recording.log.sse_events
        start = json.loads(first)
        if not 200 <= start["status"] < 300 or sum(map(len, pieces)) > MAX_STORED_BYTES:
            return
        headers = tuple((key, value) for key, value in start["headers"])
        answer = IdempotentResponse(recording.digest, start["status"], headers, b"".join(pieces), current_ms())
        try:
            await self._services.shared.store.records.save_idempotent_response(*recording.key, answer)
        except NotsoError as error:  # the client still receives the whole response
            _log.warning("a response could not be stored for its idempotency key: %s", error)


def _error_response(error: ApiError, scope: Scope) -> Response:
    retry = error.retry_after_seconds
    return JSONResponse(error.body_for(scope), error.status, {} if retry is None else {"Retry-After": str(retry)})


async def _record_message(log: AnswerLog, message: Message) -> None:
    if message["type"] == "http.response.start":
        headers = [[key.decode("latin-1"), value.decode("latin-1")] for key, value in message["headers"]]
        stored_headers = [each for each in headers if each[0].lower() not in NOT_STORED]
        log.add((_start(message["status"], stored_headers),))
    elif piece := message.get("body", b""):
        log.add((piece,))


async def _deliver(log: AnswerLog, receive: Receive, send: Send, is_repeated: Callable[[], bool]) -> None:
    number = 0
    disconnect = asyncio.create_task(wait_for_disconnect(receive))
    try:
        while not disconnect.done():
            for entry in log.sse_events[number:]:
                if number == 0:
                    start = json.loads(entry)
                    headers = [*start["headers"], *([[REPEATED, "true"]] if is_repeated() else [])]
                    raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers]
                    await send({"type": "http.response.start", "status": start["status"], "headers": raw})
                else:
                    await send({"type": "http.response.body", "body": entry, "more_body": True})
                number += 1
            if log.finished and number == len(log.sse_events):
                if not log.body:  # a failed response gets no final message, so that the client notices the failure
                    await send({"type": "http.response.body", "body": b""})
                return
            change = asyncio.create_task(log.wait(number, PING_SECONDS))
            try:
                await asyncio.wait((change, disconnect), return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
    finally:
        disconnect.cancel()


async def _copy(answer: RemoteAnswer, log: AnswerLog) -> None:
    # Copies the log until its end. Raises ApiError (503) if the replica that generates the response has stopped.
    while True:
        log.add(answer.log.sse_events[len(log.sse_events) :])
        if answer.finished:
            break
        if not await answer.log.wait(len(log.sse_events), SILENT_SECONDS) and await answer.is_abandoned():
            raise replica_stopped_error(retry_after_seconds=1)
    if answer.log.body:
        log.finish(answer.log.body)


def _start(status: int, headers: list[list[str]]) -> bytes:
    return json.dumps({"status": status, "headers": headers}).encode()


def _claim_key(owner: str, key: str) -> tuple[str, str]:
    # Idempotency keys use the same claims (locks across replicas) as resumable answers. The space in this name
    # distinguishes it from conversation names, which clients choose.
    return owner, f"idempotency-key {key}"


def _request_digest(scope: Scope, body: bytes) -> bytes:
    digest = hashlib.sha256()
    # The boundary of a multipart form is removed, because it differs each time a form is sent.
    if boundary := multipart_boundary(Headers(scope=scope).get("content-type", "")):
        body = body.replace(b"--" + boundary, b"--")
    for part in (scope["path"].encode(), scope.get("query_string", b""), body):
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()


def _key_reused_error() -> ApiError:
    message = "this Idempotency-Key was sent with another request; use a new key for each request"
    return ApiError(422, "idempotency_key_reused", message, param=HEADER)
