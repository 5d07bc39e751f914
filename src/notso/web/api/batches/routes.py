"""Routes for batches."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from notso.web.api.batches.files import expiry_ms
from notso.web.api.batches.runner import batch_runner
from notso.web.api.request_fields.fields import Fields, Name, invalid_field, works
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.given_documents import get_stored_file
from notso.web.api.shared.listing import paginate
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, read_fields_and_headers
from notso.web.edge.access import GUARDED, caller_of
from notso.web.edge.errors import ApiError
from notso.web.store.records import StoredBatch
from notso.web.values.durations import current_ms

router = APIRouter()

WINDOW_SECONDS = 86_400
OUTPUT_SECONDS = 30 * 86_400
"""Default lifetime of output files."""


class ExpiresAfter(Fields):
    """Lifetime of the output files."""

    anchor: str
    seconds: int


class BatchFields(Fields):
    """The body of POST /v1/batches."""

    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    output_expires_after: ExpiresAfter | None = None


NOTES = {
    "input_file_id": works("a file uploaded with purpose `batch`"),
    "endpoint": works("/v1/chat/completions, /v1/completions or /v1/responses"),
    "completion_window": works("24h"),
    "metadata": works("returned with the batch"),
    "output_expires_after": works("lifetime of the output files; default 30 days"),
}


@router.post("/v1/batches", dependencies=[GUARDED])
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Create a batch from an uploaded file of requests, which run at lower priority than others."""
    fields, headers = await read_fields_and_headers(request, BatchFields, NOTES)
    now_ms = current_ms()
    lifetime = fields.output_expires_after
    if lifetime is not None:
        expiry_ms(lifetime.model_dump(), now_ms, "output_expires_after")
    file = await get_stored_file(services, owner, fields.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise invalid_field("input_file_id", "input_file_id must be a file with purpose batch")
    batch_id = new_id("batch_")
    body = {
        "id": batch_id,
        "object": "batch",
        "endpoint": fields.endpoint,
        "errors": None,
        "input_file_id": file.id,
        "completion_window": fields.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_ms // 1000,
        "in_progress_at": None,
        "expires_at": now_ms // 1000 + WINDOW_SECONDS,
        **dict.fromkeys(("finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": fields.metadata,
    }
    plan = {
        "caller": astuple(caller_of(request)),
        "output_file_id": new_id("file-"),
        "error_file_id": new_id("file-"),
        "output_seconds": OUTPUT_SECONDS if lifetime is None else lifetime.seconds,
    }
    await services.shared.store.records.add_batch(StoredBatch(batch_id, owner, now_ms, body, plan))
    batch_runner(request).wake()
    return JSONResponse(body, headers=headers)


@router.get("/v1/batches", dependencies=[GUARDED])
async def batches(request: Request, services: Services, owner: Owner) -> Response:
    """List batches, newest first."""
    found = list(reversed(await services.shared.store.records.batches(owner)))
    page, by_id = paginate([each.body for each in found], request.query_params), {each.id: each for each in found}
    page["data"] = [await _current_body(services, by_id[each["id"]]) for each in page["data"]]
    return JSONResponse(page)


@router.get("/v1/batches/{batch_id}", dependencies=[GUARDED])
async def show(services: Services, owner: Owner, batch_id: str) -> Response:
    """Return a batch, with the number of finished requests."""
    return JSONResponse(await _current_body(services, await _get_batch(services, owner, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", dependencies=[GUARDED])
async def cancel(request: Request, services: Services, owner: Owner, batch_id: str) -> Response:
    """Cancel a batch. The answers generated so far become available. A finished batch is not changed."""
    for _ in range(3):  # try again if the status changes between reading and writing
        batch = await _get_batch(services, owner, batch_id)
        body = dict(batch.body)
        if body["status"] not in ("validating", "in_progress"):
            break
        changed = body | {"status": "cancelling", "cancelling_at": int(time.time())}
        if await services.shared.store.records.change_batch(owner, batch_id, changed, before=body["status"]):
            batch_runner(request).stop(batch_id)
            break
    return JSONResponse(await _current_body(services, await _get_batch(services, owner, batch_id)))


async def _get_batch(services: ApiServices, owner: str, batch_id: str) -> StoredBatch:
    batch = await services.shared.store.records.batch(owner, batch_id)
    if batch is None:
        raise ApiError(404, "not_found", "no batch with that id is stored", param="batch_id")
    return batch


async def _current_body(services: ApiServices, batch: StoredBatch) -> dict[str, Any]:
    if not batch.is_open:
        return dict(batch.body)
    records, counts = services.shared.store.records, batch.body["request_counts"]
    done, failed = [len(await records.lines(batch.plan[name])) for name in ("output_file_id", "error_file_id")]
    return dict(batch.body) | {"request_counts": counts | {"completed": done, "failed": failed}}
