"""Run batches. A lease in the database names the process that runs a batch. After the lease has expired, another
process may continue the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterable
from typing import Any, cast

from fastapi import FastAPI, Request

from notso.smollm3 import NotsoError
from notso.text_file import NotTextError, decode_text
from notso.web.api.request_fields.fields import invalid_field
from notso.web.api.shared.background import Repetition, internal_scope, send_internal
from notso.web.api.shared.batch_line import BatchLine, read_line
from notso.web.api.shared.services import ApiServices
from notso.web.api.shared.serving import BACKGROUND
from notso.web.edge.access import Caller, KeyRing
from notso.web.edge.access_log import AccessLog
from notso.web.edge.errors import ApiEdge, ApiError
from notso.web.store.protocol import UNSHARED_SEARCH_SECONDS
from notso.web.store.records import StoredBatch, StoredFile
from notso.web.values.durations import current_ms
from notso.web.values.errors import EngineUnavailableError
from notso.web.values.json_steps import json_bytes
from notso.web.values.request_id import HEADER

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINES = 50_000
MAX_ERRORS = 100
"""Maximum number of errors reported for an invalid input file."""
MAX_BATCHES = 4
"""Maximum number of batches that a server runs at once, each for a different owner."""
MAX_AT_ONCE = 32
"""Maximum number of requests of one batch that run at once."""
SEARCH_SECONDS = 10.0
"""Maximum interval between searches for batches to run, if other servers also use the store."""
RENEW_SECONDS = 5.0
_log = logging.getLogger("notso.web.api")


class BatchRunner:
    """Runs open batches in the background. Use only on the event loop."""

    def __init__(self, services: ApiServices, ring: KeyRing) -> None:
        self.services = services
        self.ring = ring
        self.holder = secrets.token_hex(16)
        self.app: FastAPI | None = None
        self._due = asyncio.Event()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # batch id -> owner and task
        self._stopping: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, app: FastAPI) -> None:
        self.app = app
        self._task = asyncio.create_task(self._claim_batches())

    async def close(self) -> None:
        """Interrupt running batches; they continue after a restart or on another server."""
        tasks = [task for _, task in self._running.values()]
        for task in (*tasks, *([self._task] if self._task is not None else [])):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._due.set()

    def stop(self, batch_id: str) -> None:
        """Stop a canceled batch if this server is running it."""
        if (stopping := self._stopping.get(batch_id)) is not None:
            stopping.set()
        self.wake()

    async def _claim_batches(self) -> None:
        records, store = self.services.shared.store.records, self.services.shared.store
        while True:
            self._due.clear()
            with contextlib.suppress(NotsoError):  # if the database is unreachable, the next round tries again
                while len(self._running) < MAX_BATCHES:
                    busy_owners = [owner for owner, _ in self._running.values()]
                    # If no other server shares the store, leases of batches that are not running here belong to earlier
                    # processes, and count as expired.
                    now_ms = current_ms() if store.is_shared else 1 << 62
                    batch = await records.claim_batch(self.holder, busy_owners, now_ms)
                    if batch is None:
                        break
                    task = asyncio.create_task(self._run(batch))
                    self._running[batch.id] = batch.owner, task
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_SECONDS if store.is_shared else UNSHARED_SEARCH_SECONDS):
                    await self._due.wait()

    async def _run(self, batch: StoredBatch) -> None:
        self._stopping[batch.id] = asyncio.Event()
        try:
            await _Run(self, batch, self._stopping[batch.id]).run()
            self.wake()
        except NotsoError as error:
            _log.warning("a batch was interrupted and will be continued later: %s", error)
        except Exception:
            _log.exception("a batch was interrupted and will be continued later")
        finally:
            del self._stopping[batch.id]
            del self._running[batch.id]


def batch_runner(request: Request) -> BatchRunner:
    return cast(BatchRunner, request.app.state.batches)


class _Run:
    def __init__(self, runner: BatchRunner, batch: StoredBatch, stopping: asyncio.Event) -> None:
        self._runner = runner
        self._services = runner.services
        self._records = runner.services.shared.store.records
        self._batch = batch
        self._body = dict(batch.body)
        self._stopping = stopping
        self._inner_app = AccessLog(ApiEdge(runner.services.inner_app))
        self._lost = False  # whether another process has leased the batch, or the batch has ended
        self._repeating = asyncio.Lock()

    async def run(self) -> None:
        lines: list[bytes] = []
        if self._body["status"] in ("validating", "in_progress"):
            lines, errors = await self._read_input()
            if errors:
                data = {"object": "list", "data": errors[:MAX_ERRORS]}
                await self._set_status("failed", is_open=False, errors=data)
                return
        if self._body["status"] == "validating":
            counts = {"total": len(lines), "completed": 0, "failed": 0}
            await self._set_status("in_progress", request_counts=counts)
        if self._body["status"] == "in_progress":
            await self._run_requests(lines)
        if self._lost:
            return
        if self._body["status"] == "in_progress":
            if self._is_expired():
                await self._expire_remaining(lines)
            await self._set_status("finalizing")
        await self._finish()

    async def _read_input(self) -> tuple[list[bytes], list[dict[str, Any]]]:
        pieces = [piece async for piece in self._records.content(self._batch.owner, self._body["input_file_id"])]
        content = b"".join(pieces)
        work = self._services.shared.large_work
        return await work.run(lambda: _validate_input(content, self._body["endpoint"]), len(content), self._batch.owner)

    async def _run_requests(self, lines: list[bytes]) -> None:
        done = await self._records.lines(self._batch.plan["output_file_id"], self._batch.plan["error_file_id"])
        missing = iter([number for number in range(len(lines)) if number not in done])
        tasks = [asyncio.create_task(each) for each in (self._run_workers(lines, missing), self._renew_lease())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run_workers(self, lines: list[bytes], numbers: Iterable[int]) -> None:
        engine = self._services.shared.engine
        await engine.wait_for_first_load()  # until then, the number of concurrent sequences is unknown
        at_once = min(MAX_AT_ONCE, engine.info.max_num_seqs if engine.info is not None else 1)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._work(lines, numbers))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _renew_lease(self) -> None:
        # Renews the lease until the batch is canceled, expires, or is leased by another process.
        while True:
            batch = await self._records.renew_batch(self._batch.id, self._runner.holder, current_ms())
            self._lost = batch is None
            if batch is not None:
                self._body = dict(batch.body)
            if self._lost or self._body["status"] != "in_progress" or self._is_expired():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._stopping.wait()

    async def _work(self, lines: list[bytes], numbers: Iterable[int]) -> None:
        for number in numbers:
            entry, body = await asyncio.to_thread(self._read_request, lines[number])
            async with self._repeating:  # wait while another request is being repeated (see below)
                pass
            repetition = Repetition()
            status, headers, answer = await self._send_request(entry.url, body, repetition)
            if status in (500, 503):
                # Another request may have made the engine fail, so failed requests are repeated, one at a time.
                async with self._repeating:
                    status, headers, answer = await self._send_request(entry.url, body, repetition)
            response = {
                "status_code": status,
                "request_id": headers.get(HEADER.lower(), ""),
                "body": json.loads(answer or b"{}"),
            }
            if not await self._write(number, lines[number], entry.custom_id, response=response):
                self._lost = True
                return

    def _read_request(self, line: bytes) -> tuple[BatchLine, bytes]:
        entry = read_line(line, (self._body["endpoint"],))
        return entry, json_bytes(entry.body)

    async def _send_request(self, url: str, body: bytes, repetition: Repetition) -> tuple[int, dict[str, str], bytes]:
        while True:
            caller = await self._runner.ring.with_current_key(Caller(*self._batch.plan["caller"]))
            if caller is None:
                error = ApiError(401, "invalid_api_key", "the key that created this batch was revoked")
                return 401, {}, json.dumps(error.body).encode()
            scope = {**internal_scope(self._runner.app, url, caller), BACKGROUND: True}
            status, headers, answer = await send_internal(self._inner_app, scope, body)
            if status == 503 and self._services.shared.stopping:
                raise EngineUnavailableError("the server is stopping")  # another process will repeat the request
            if not await repetition.wait(status, headers):
                return status, headers, answer

    async def _write(
        self,
        number: int,
        line: bytes,
        custom_id: str,
        *,
        response: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
    ) -> bool:
        has_failed = response is None or response["status_code"] != 200
        name = hashlib.sha256(b"%s %d " % (self._batch.id.encode(), number) + line).hexdigest()[:24]
        entry = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
        content = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        file_id = self._batch.plan["error_file_id" if has_failed else "output_file_id"]
        return await self._records.add_line(self._batch.id, self._runner.holder, file_id, number, content)

    async def _expire_remaining(self, lines: list[bytes]) -> None:
        done = await self._records.lines(self._batch.plan["output_file_id"], self._batch.plan["error_file_id"])
        error = {"code": "batch_expired", "message": "this request could not be answered before the batch expired"}
        for number, line in enumerate(lines):
            if number not in done:
                custom_id = read_line(line, ENDPOINTS).custom_id
                await self._write(number, line, custom_id, error=error)

    async def _finish(self) -> None:
        now_ms, plan = current_ms(), self._batch.plan
        expires_ms = now_ms + 1000 * plan["output_seconds"]
        finished, counts = {}, {}
        for kind, counted in (("output", "completed"), ("error", "failed")):
            file_id = plan[f"{kind}_file_id"]
            file = StoredFile(file_id, f"{self._batch.id}_{kind}.jsonl", "batch_output", 0, now_ms, expires_ms)
            counts[counted] = len(await self._records.lines(file_id))
            if await self._records.finish_file(self._batch.owner, file) is not None:
                finished[f"{kind}_file_id"] = file_id
        late = self._body["status"] == "finalizing" and self._is_expired() and counts["failed"]
        status = "cancelled" if self._body["status"] == "cancelling" else "expired" if late else "completed"
        counts = self._body["request_counts"] | counts
        await self._set_status(status, is_open=False, request_counts=counts, **finished)

    async def _set_status(self, status: str, *, is_open: bool = True, **fields: Any) -> None:
        before = self._body["status"]
        changed = self._body | fields | {"status": status, f"{status}_at": int(time.time())}
        owner, id = self._batch.owner, self._batch.id
        if await self._records.change_batch(owner, id, changed, before=before, is_open=is_open):
            self._body = changed
        elif (found := await self._records.batch(owner, id)) is not None:
            self._body = dict(found.body)

    def _is_expired(self) -> bool:
        return time.time() >= float(self._body["expires_at"])


def _validate_input(content: bytes, endpoint: str) -> tuple[list[bytes], list[dict[str, Any]]]:
    try:
        content = decode_text(content).encode()
    except NotTextError as error:
        return [], [_error("invalid_file", f"the input file {error}")]
    lines: list[bytes] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip() or len(errors) > MAX_ERRORS:
            continue
        try:
            entry = read_line(line.strip(), (endpoint,))
            if entry.custom_id in seen:
                message = f"custom_id is already used by an earlier line: {entry.custom_id[:80]}"
                raise invalid_field("custom_id", message, "duplicate_custom_id")
            seen.add(entry.custom_id)
            lines.append(line.strip())
        except ApiError as error:
            errors.append({"code": error.code, "message": error.message, "param": error.param, "line": number})
    if len(lines) > MAX_LINES:
        errors.append(_error("too_many_tasks", f"a batch has at most {MAX_LINES:,} lines; this one has {len(lines):,}"))
    if not lines and not errors:
        errors.append(_error("empty_file", "the input file is empty or has been deleted"))
    return lines, errors


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
