"""Add receipts to API responses: records of the model, seed, parameters and token ids, which `notso verify` can check.

The request header `x-notso-receipt: open` adds the field `notso_receipt` to the response, or to the last event of a
stream. With `sealed`, the receipt contains hashes instead of the conversation.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from notso.smollm3 import Event, NotsoError
from notso.web.api.request_fields.fields import invalid_field
from notso.web.api.shared.resumable import TokenRecord
from notso.web.api.shared.serializer import Serializer, as_json
from notso.web.engine.port import ChatEngine
from notso.web.engine.running import Submission

RECEIPT = "x-notso-receipt"
FIELD = "notso_receipt"


def requested_receipt(request: Request) -> str | None:
    """Return the requested form of receipt, or None. Raises ApiError (400) if unknown."""
    form = request.headers.get(RECEIPT)
    if form not in (None, "open", "sealed"):
        raise invalid_field(RECEIPT, f"{RECEIPT} must be open or sealed")
    return form


def with_seed_and_token_ids(submission: Submission, seed: int | None = None) -> Submission:
    """Return a submission that reports token ids and has a seed: its own, else `seed`, else a random one."""
    params = submission.params
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63) if seed is None else seed)
    return replace(submission, params=params, options=replace(submission.options, token_ids=True))


class ReceiptSerializer:
    """Adds the receipts of all choices to a serializer's last event and body."""

    def __init__(self, inner: Serializer, engine: ChatEngine, submissions: Sequence[Submission], form: str) -> None:
        self.id, self.ping = inner.id, inner.ping
        self.initial_events, self.failure, self.error_frame = inner.initial_events, inner.failure, inner.error_frame
        self.inner = inner
        self._engine = engine
        self._submissions = submissions
        self._form = form
        self._records = [TokenRecord(each.options.replay) for each in submissions]
        # Frames of the latest `end` event. They are held back, because the receipts are added to the last frame of the
        # stream, which may be one of them.
        self._end_frames: list[bytes] = []
        self._receipts: Any = None

    def fresh_copy(self) -> ReceiptSerializer:
        return ReceiptSerializer(self.inner.fresh_copy(), self._engine, self._submissions, self._form)

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        if event.kind in ("started", "tokens"):
            self._records[number].feed(event)
            return
        frames = self.inner.feed(number, event)
        if event.kind == "end":
            previous, self._end_frames = self._end_frames, list(frames)
            yield from previous
        else:
            yield from frames

    async def finalize(self, added: Mapping[str, Any] | None = None) -> None:
        receipts = [
            await asyncio.to_thread(self._receipt, *each) for each in zip(self._submissions, self._records, strict=True)
        ]
        self._receipts = receipts[0] if len(receipts) == 1 else receipts
        # If the inner serializer stores the response, the receipts are stored with it.
        await self.inner.finalize({**(added or {}), FIELD: self._receipts})

    def closing_events(self) -> Iterator[bytes]:
        frames = [*self._end_frames, *self.inner.closing_events()]
        last = max((at for at, frame in enumerate(frames) if _split(frame) is not None), default=None)
        for at, frame in enumerate(frames):
            head, value = (_split(frame) if at == last else None) or (b"", {})
            yield head + as_json(value | {FIELD: self._receipts}).encode() + _tail(frame) if value else frame

    def body(self) -> Any:
        body = self.inner.body()
        if self._receipts is None:
            return body
        if isinstance(body, list):  # in llama.cpp's API: one object per choice
            receipts = self._receipts if isinstance(self._receipts, list) else [self._receipts]
            return [each | {FIELD: receipt} for each, receipt in zip(body, receipts, strict=True)]
        return body | {FIELD: self._receipts}

    def _receipt(self, submission: Submission, record: TokenRecord) -> Mapping[str, Any]:
        params = submission.params
        if submission.options.prompt_only:
            return {"error": "the request generates no tokens"}
        reduced = replace(params, max_tokens=record.limit or 1, min_tokens=min(params.min_tokens, record.limit))
        options = replace(submission.options, replay=record.replay)
        failure = "the engine has not started this answer"
        # A quota may have lowered max_tokens. Try the requested value first, then the limit that the engine reported.
        for each in (params, reduced):
            try:
                receipt = self._engine.receipt(submission.prompt, each, options, sealed=self._form == "sealed")
            except NotsoError as error:
                failure = str(error)
            else:
                if receipt.get("limit") == record.limit:
                    return receipt
        return {"error": failure}


def _split(frame: bytes) -> tuple[bytes, dict[str, Any]] | None:
    # Splits a frame into the SSE prefix and the JSON object. Returns None for frames without an object, such as [DONE].
    at = frame.find(b"{")
    if at < 0 or (b"data: {" not in frame and at > 0):
        return None
    value = json.loads(frame[at:])
    return frame[:at], value


def _tail(frame: bytes) -> bytes:
    return frame[len(frame.rstrip(b"\n")) :]
