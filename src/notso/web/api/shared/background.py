"""Continue responses after a restart: background responses, and streams with X-Conversation-Id and `store`.

Until such a response ends, its request, seed and tokens are stored in the database. If its process stops, another
process continues the response under the same id: it repeats the request internally and replays the stored tokens.
The interruption does not change the response's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope

from notso.smollm3 import NotsoError, Replay
from notso.text_file import decode_text
from notso.web.api.request_fields.fields import parse_repaired
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.receipts import with_seed_and_token_ids
from notso.web.api.shared.resumable import ResumableStream
from notso.web.edge.access import INTERNAL_CALLER, Caller, KeyRing, caller_of
from notso.web.edge.access_log import AccessLog
from notso.web.edge.errors import ApiEdge
from notso.web.engine.running import Submission
from notso.web.services import SharedServices
from notso.web.store.protocol import UNSHARED_SEARCH_SECONDS, StoredResponse
from notso.web.store.records import UnfinishedResponse
from notso.web.values.durations import current_ms

LONGEST_RETRY_SECONDS = 30
MAX_FAILURES = 8
"""An internal request fails after this many responses with status 503, that is, after about ten minutes of pauses."""
LONGEST_PAUSE_SECONDS = 300


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
        INTERNAL_CALLER: caller,
    }


class Repetition:
    """Waits between attempts at an internal request. After status 503, but not after 429, attempts are limited."""

    def __init__(self) -> None:
        self._failures = 0

    async def wait(self, status: int, headers: Mapping[str, str]) -> bool:
        """Wait before the next attempt. Return False if there should be none."""
        self._failures += status == 503
        if status != 429 and (status != 503 or self._failures >= MAX_FAILURES):
            return False
        wait_s = headers.get("retry-after", "")
        seconds = min(LONGEST_RETRY_SECONDS, max(1, int(wait_s) if wait_s.isdecimal() else 1))
        pause_s = min(LONGEST_PAUSE_SECONDS, 5 << (self._failures - 1)) if status == 503 else 0
        await asyncio.sleep(max(seconds, pause_s))
        return True


async def send_internal(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, dict[str, str], bytes]:
    status, headers, pieces = 500, dict[str, str](), list[bytes]()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive_once({"type": "http.request", "body": body, "more_body": False}), send)
    return status, headers, b"".join(pieces)


def receive_once(message: Message) -> Receive:
    """Return a `receive` that delivers one message and then waits forever."""
    messages = [message]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


UNFINISHED = "notso.unfinished"
"""ASGI scope key of a request that continues the response of a stopped process. The value is an UnfinishedResponse."""
CREATED = "notso.created"
"""ASGI scope key of the creation time of a request's response, in milliseconds."""
STORED_HEADERS = ("x-conversation-id", "x-notso-receipt")
SEARCH_SECONDS = 20.0
"""Interval between searches for responses of stopped processes."""
SAVE_SECONDS = 1.0
"""Interval at which the tokens of a running response are stored."""
_log = logging.getLogger("notso.web.api")


class BackgroundResponses:
    """Stores responses that survive a restart, and continues those of stopped processes. Use only on the event loop."""

    def __init__(self, shared: SharedServices, ring: KeyRing) -> None:
        self._shared = shared
        self._ring = ring
        self._holder = secrets.token_hex(8)
        self._own_ids: set[str] = set()  # ids of the responses that this process is generating
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, app: FastAPI, inner_app: Any) -> None:
        self._start_task(self._claim_responses(app, AccessLog(ApiEdge(inner_app))))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(NotsoError):  # if the database is unreachable, the leases expire later
            await self._shared.store.records.release_unfinished_responses(self._holder)

    async def persist(self, request: Request, owner: str, response_id: str, seed: int, stream: ResumableStream) -> None:
        """Store a running response with its tokens until it ends."""
        resumed = resumed_response(request)
        has_read = resumed is not None and await _has_read_events(resumed)
        body = await asyncio.to_thread(decode_text, await request.body())
        self._own_ids.add(response_id)
        stream.is_continued = lambda: self._is_continued(stream)
        stream.is_read = stream.is_read or has_read
        if resumed is None:
            caller = json.dumps(astuple(caller_of(request)))
            headers = {name: request.headers[name] for name in STORED_HEADERS if name in request.headers}
            unfinished = UnfinishedResponse(
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
            try:
                await self._shared.store.records.add_unfinished_response(unfinished, self._holder)
            except BaseException:
                stream.is_continued = lambda: False
                self._start_task(self._forget(owner, response_id))
                raise
        self._start_task(self._save_progress(response_id, stream))
        stream.follow_task.add_done_callback(lambda _: self._start_task(self._on_end(owner, response_id, stream)))

    async def _forget(self, owner: str, response_id: str) -> None:
        # The response may have been stored in spite of the error. Unless it is deleted, a process will continue it.
        with contextlib.suppress(NotsoError):
            await self._shared.store.records.delete_unfinished_response(owner, response_id)
        self._own_ids.discard(response_id)

    async def _save_progress(self, response_id: str, stream: ResumableStream) -> None:
        record = stream.record
        if record is None:
            return
        replayed = stored = record.replayed
        saved_state: tuple[str, int, bool] | None = None
        while not (await asyncio.wait([stream.follow_task], timeout=SAVE_SECONDS))[0]:
            state = record.origin, record.tokens, stream.is_read
            if state == saved_state or state[:2] == ("", replayed):  # nothing is new, or the model is still loading
                continue
            progress = json.dumps(asdict(record.since(stored)) | {"is_read": stream.is_read})
            with contextlib.suppress(NotsoError):  # if the database is unreachable, the next round tries again
                is_further, records = record.tokens > replayed, self._shared.store.records
                await records.save_progress(response_id, self._holder, stored, progress, is_further=is_further)
                saved_state, stored = state, state[1]

    async def _on_end(self, owner: str, response_id: str, stream: ResumableStream) -> None:
        if stream.is_continued():
            return  # the unfinished response stays stored for the process that continues it
        while True:
            with contextlib.suppress(NotsoError):  # if the database is unreachable, the loop tries again
                await self._shared.store.records.delete_unfinished_response(owner, response_id)
                self._own_ids.discard(response_id)
                return
            await asyncio.sleep(SEARCH_SECONDS)

    def _is_continued(self, stream: ResumableStream) -> bool:
        is_whole = stream.record is not None and stream.record.finish not in (None, "cancelled")
        return self._shared.stopping and not is_whole and not stream.running.stopped_by

    async def _claim_responses(self, app: FastAPI, inner_app: Any) -> None:
        records, is_shared = self._shared.store.records, self._shared.store.is_shared
        while True:
            with contextlib.suppress(NotsoError):  # if the database is unreachable, the next round tries again
                if is_shared:
                    await records.renew_unfinished_responses(self._holder, current_ms())
                # If no other server shares the store, all leases belong to earlier processes and count as expired.
                until = current_ms() if is_shared else 1 << 62
                while not self._shared.stopping:
                    unfinished = await records.claim_unfinished_response(self._holder, sorted(self._own_ids), until)
                    if unfinished is None:
                        break
                    self._own_ids.add(unfinished.id)
                    self._start_task(self._continue_claimed(app, inner_app, unfinished))
            await asyncio.sleep(SEARCH_SECONDS if is_shared else UNSHARED_SEARCH_SECONDS)

    async def _continue_claimed(self, app: FastAPI, inner_app: Any, unfinished: UnfinishedResponse) -> None:
        try:
            await self._continue_response(app, inner_app, unfinished)
        except BaseException:
            self._own_ids.discard(unfinished.id)  # so that it can be claimed again
            raise

    async def _continue_response(self, app: FastAPI, inner_app: Any, unfinished: UnfinishedResponse) -> None:
        caller = await self._ring.with_current_key(Caller(*json.loads(unfinished.caller)))
        if caller is None:
            return await self._fail(unfinished, "the key was revoked")
        if unfinished.has_used_all_tries:
            return await self._fail(unfinished, "the server stopped several times during this response")
        status, error = await self._repeat_request(app, inner_app, unfinished, caller)
        if error.get("param") == "replay" and not await _has_read_events(unfinished):
            # The tokens cannot be replayed, because the model or the version of the numerical code has changed. The
            # response can start over, because none of its events have been sent.
            status, error = await self._repeat_request(app, inner_app, replace(unfinished, progress=""), caller)
        if status != 200:
            message = str(error.get("message", "the response could not be continued"))
            await self._fail(unfinished, message, str(error.get("code", "server_error")))
        return None

    async def _repeat_request(
        self, app: FastAPI, inner_app: Any, unfinished: UnfinishedResponse, caller: Caller
    ) -> tuple[int, Mapping[str, Any]]:
        scope: Scope = {**internal_scope(app, unfinished.path, caller), UNFINISHED: unfinished}
        scope["headers"] += [(name.encode(), value.encode()) for name, value in json.loads(unfinished.headers).items()]
        body, repetition = await asyncio.to_thread(unfinished.body.encode), Repetition()
        await self._shared.engine.wait_for_first_load()  # loading may take longer than all attempts together
        while True:
            status, headers, answer = await send_internal(inner_app, {**scope, "state": {}}, body)
            if status == 503 and self._shared.stopping:
                raise asyncio.CancelledError  # the next process continues the response
            if not await repetition.wait(status, headers):
                return status, json.loads(answer or b"{}").get("error", {}) if status != 200 else {}

    async def _fail(self, unfinished: UnfinishedResponse, message: str, code: str = "server_error") -> None:
        _log.warning("a response could not be continued: %s", message)
        store = self._shared.store
        if not unfinished.conversation:
            body = await asyncio.to_thread(queued_body, unfinished)
            body |= {"status": "failed", "error": {"code": code, "message": message}}
            failed = StoredResponse(unfinished.id, None, body, (), unfinished.created_ms)
            await store.save_response(unfinished.owner, failed)
        await store.records.delete_unfinished_response(unfinished.owner, unfinished.id)
        self._own_ids.discard(unfinished.id)

    def _start_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a response could not be stored or continued", exc_info=error)


def queued_body(unfinished: UnfinishedResponse) -> dict[str, Any]:
    """Return the body of a response that another process will continue. Slow for large requests."""
    body, _ = parse_repaired(unfinished.body.encode())
    return {
        "id": unfinished.id,
        "object": "response",
        "created_at": unfinished.created_ms // 1000,
        "completed_at": None,
        "status": "queued",
        "error": None,
        "incomplete_details": None,
        "model": body.get("model") or "",
        "output": [],
        "usage": None,
        "background": True,
        "service_tier": "default",
        **echoed_fields(body),
    }


def echoed_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a response repeats from `body`, a valid request."""
    # The types in client libraries require all fields, even those that the request omits.
    format = (body.get("text") or {}).get("format") or {"type": "text"}
    if format["type"] == "json_schema":
        format = format | {"description": format.get("description"), "strict": format.get("strict") is True}
    given = ("instructions", "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user")
    limits = {name: body.get(name) for name in ("max_output_tokens", "max_tool_calls")}
    return {
        **{name: body.get(name) for name in given},
        **{name: None if limit is None else int(limit) for name, limit in limits.items()},
        "frequency_penalty": 0,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "presence_penalty": 0,
        "previous_response_id": body.get("previous_response_id") or None,
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "store": body.get("store") is not False,
        "text": {"format": format},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_echoed_tool(each) for each in body.get("tools") or ()],
        "top_logprobs": int(body.get("top_logprobs") or 0),
        "truncation": body.get("truncation") or "disabled",
    }


def _echoed_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    match tool["type"]:
        case "function":
            return {"description": None, "parameters": None, "strict": None, **tool}
        case "namespace":
            return {**tool, "tools": [_echoed_tool(each) for each in tool.get("tools") or ()]}
    return tool


def with_replay(submission: Submission, unfinished: UnfinishedResponse | None) -> Submission:
    """Return a submission that reports token ids, has a seed, and replays the tokens of `unfinished`."""
    submission = with_seed_and_token_ids(submission, unfinished.seed if unfinished is not None else None)
    if unfinished is None or not unfinished.progress:
        return submission
    progress = json.loads(unfinished.progress)
    replay = Replay(tuple(progress["ids"]), tuple(progress["closed_at"]), progress["origin"])
    return replace(submission, options=replace(submission.options, replay=replay))


async def _has_read_events(unfinished: UnfinishedResponse) -> bool:
    body = await asyncio.to_thread(json.loads, unfinished.body)  # the body may be several megabytes long
    return bool(body.get("stream") or json.loads(unfinished.progress or "{}").get("is_read"))


def resumed_response(request: Request) -> UnfinishedResponse | None:
    unfinished: UnfinishedResponse | None = request.scope.get(UNFINISHED)
    return unfinished


def response_identity(request: Request, prefix: str) -> tuple[str, int]:
    """Return the response's id and creation time (in seconds), which a restart does not change."""
    unfinished = resumed_response(request)
    return new_id(prefix) if unfinished is None else unfinished.id, created_ms(request) // 1000


def created_ms(request: Request) -> int:
    unfinished = resumed_response(request)
    return unfinished.created_ms if unfinished is not None else int(request.scope.setdefault(CREATED, current_ms()))
