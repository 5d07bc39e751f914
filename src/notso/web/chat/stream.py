"""A turn as server-sent events. GET attaches and changes nothing; a reader that goes away stops nothing.

Events are encoded here and sent by a plain streaming response: when a reader leaves in the middle of an event,
FastAPI's own producer for generator routes ends with an unhandled group of errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi.sse import format_sse_event

from notso.web.chat.frames import announcement_html, update_html
from notso.web.chat.turn_log import TurnLog
from notso.web.store.protocol import StoredMessage
from notso.web.wording import words

PING_SECONDS = 15.0


def last_number(header: str | None) -> int | None:
    """The number in `Last-Event-ID`; None where it is missing or not one of ours."""
    if header is None or not header.isascii() or not header.isdecimal() or len(header) > 15:
        return None
    return int(header)


async def turn_events(message_id: str, log: TurnLog, after: int | None) -> AsyncIterator[bytes]:
    """All updates after number `after` (None: a snapshot first), and `done` as the last event, always."""
    yield format_sse_event(comment="attached")
    number, phase = after, None
    while True:
        update = log.since(number)
        if number != update.number or phase is None:
            html = update_html(message_id, update)
            if phase != update.phase:
                html += announcement_html(update.phase)
            yield format_sse_event(data_str=html, id=str(update.number))
        if phase != update.phase:
            phase = update.phase
            yield _named("status", message_id, update.number, state=phase)
        number = update.number
        if log.finished and number == log.number:
            break
        if not await log.wait(number, PING_SECONDS):
            yield format_sse_event(comment="ping")
    if log.error is not None:
        yield _named("error", message_id, number, message=log.error, retryable=True)
    yield _named("done", message_id, number, state=log.phase)


def finished_log(answer: StoredMessage, answer_html: str, reasoning_html: str) -> TurnLog:
    """The log of a turn whose own log is gone: its end, from the database."""
    log = TurnLog()
    log.write("reasoning", reasoning_html, "")
    log.write("answer", answer_html, "")
    log.finish(answer.state, words[f"phase_{answer.state}"], answer.note if answer.state == "failed" else None)
    return log


def _named(event: str, message_id: str, number: int, **data: str | bool) -> bytes:
    return format_sse_event(event=event, data_str=json.dumps({"message": message_id, **data}), id=str(number))
