"""A turn as server-sent events. GET attaches and changes nothing; a reader that goes away stops nothing.

Events are encoded here and sent by a plain streaming response: when a reader leaves in the middle of an event,
FastAPI's own producer for generator routes ends with an unhandled group of errors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi.sse import format_sse_event

from notso.web.chat.feed import Feed
from notso.web.chat.frames import announcement_html, update_html
from notso.web.chat.open_streams import OpenStreams
from notso.web.chat.turn_log import Figure, TurnLog
from notso.web.store.protocol import StoredMessage
from notso.web.wording import words

PING_SECONDS = 15.0
UPDATE_SECONDS = 0.1


def last_number(header: str | None) -> int | None:
    """The number in `Last-Event-ID`; None where it is missing or not one of ours."""
    if header is None or not header.isascii() or not header.isdecimal() or len(header) > 15:
        return None
    return int(header)


async def turn_events(message_id: str, log: TurnLog, after: int | None) -> AsyncIterator[bytes]:
    """All updates after number `after` (None: a snapshot first), and `done` as the last event, always.

    A reader gets at most ten updates a second: what comes in between travels with the next one.
    """
    yield format_sse_event(comment="attached")
    loop = asyncio.get_running_loop()
    number, phase, progress, last = after, None, None, float("-inf")
    while True:
        if not log.finished and (early := last + UPDATE_SECONDS - loop.time()) > 0:
            await log.ending(early)
        last = loop.time()
        update = log.since(number)
        if number != update.number or phase is None:
            html = update_html(message_id, update)
            if phase != update.phase:
                html += announcement_html(update.phase)
            yield format_sse_event(data_str=html, id=str(update.number))
        if phase != update.phase:
            phase = update.phase
            yield _named("status", message_id, update.number, state=phase, label=update.label)
        if update.progress and progress != update.progress:
            progress = update.progress
            yield _named("progress", message_id, update.number, phase=phase, **progress)
        number = update.number
        if log.finished and number == log.number:
            break
        if not await log.wait(number, PING_SECONDS):
            yield format_sse_event(comment="ping")
    if log.figures:
        yield _named("usage", message_id, number, **log.figures)
    if log.error is not None:
        yield _named("error", message_id, number, message=log.error, retryable=True)
    yield _named("done", message_id, number, state=log.phase)


async def feed_events(feed: Feed, after: str, owner: str, chat_id: str, tab: str) -> AsyncIterator[bytes]:
    """What other tabs change, for as long as the page listens."""
    yield format_sse_event(comment="attached")
    while not feed.closed:
        revision = feed.revision
        for event in feed.since(after, owner, chat_id, tab):
            yield format_sse_event(event=event, data_str="{}", id=revision)
        after = revision
        if not await feed.wait(after, PING_SECONDS):
            yield format_sse_event(comment="ping")


async def counted(streams: OpenStreams, owner: str, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same events, counted as one open stream of the owner's while they are read."""
    streams.opened(owner)
    try:
        async for event in events:
            yield event
    finally:
        streams.closed(owner)


def finished_log(answer: StoredMessage, answer_html: str, reasoning_html: str) -> TurnLog:
    """The log of a turn whose own log is gone: its end, from the database."""
    log = TurnLog()
    log.write("reasoning", reasoning_html, "")
    log.write("answer", answer_html, "")
    error = answer.note if answer.state == "failed" else None
    log.finish(answer.state, words[f"phase_{answer.state}"], error, asdict(answer.numbers))
    return log


def _named(event: str, message_id: str, number: int, **data: str | bool | Figure) -> bytes:
    return format_sse_event(event=event, data_str=json.dumps({"message": message_id, **data}), id=str(number))
