"""Send the events of a turn, and the change feed that keeps the browser tabs of an owner in sync.

A GET request attaches to a turn without side effects, and disconnecting does not stop the turn. The feed is kept only
in memory.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from html import escape

# Events are encoded here and sent by a plain StreamingResponse. FastAPI's own event routes end with an unhandled
# exception group if a client disconnects in the middle of an event.
from fastapi.sse import format_sse_event

from notso.web.rendering.extensions import translate_labels
from notso.web.store.protocol import StoredMessage
from notso.web.turns.turn_log import ReaderPosition, Stat, TurnLog, Update
from notso.web.values.wording import language, number, words

MAX_CHATS = 512
MAX_TABS = 16


class Feed:
    """Counter of changes to chats since the server started. Use on the event loop only."""

    def __init__(self) -> None:
        # Called for each local change. Arguments: owner, chat, tab, and whether messages changed.
        self.at_announce: Callable[[str, str, str, bool], None] | None = None
        self._process_id = secrets.token_hex(4)
        self._number = 0
        self._lists: dict[str, int] = {}
        # Owner -> chat -> tab -> number of the last change. A chat is looked up only under its owner: otherwise, users
        # could follow chats of others, and make pages of others reload by announcing changes to arbitrary ids.
        self._turns: dict[str, OrderedDict[str, OrderedDict[str, int]]] = {}
        self._dropped: dict[str, int] = {}  # by owner: number of the last change to a chat dropped from `_turns`
        self._changed = asyncio.Event()
        self.closed = False

    @property
    def revision(self) -> str:
        return f"{self._process_id}-{self._number}"

    def announce(self, owner: str, chat_id: str, tab: str, *, turns: bool = True) -> None:
        """Publish a change made in `tab`. `turns` is true if messages have changed."""
        self.apply_changes(owner, chat_id, tab, turns)
        if self.at_announce is not None:
            self.at_announce(owner, chat_id, tab, turns)

    def apply_changes(self, owner: str, chat_id: str, tab: str, turns: bool) -> None:
        self._number += 1
        self._lists[owner] = self._number
        if turns:
            chats = self._turns.setdefault(owner, OrderedDict())
            tabs = chats.setdefault(chat_id, OrderedDict())
            chats.move_to_end(chat_id)
            tabs[tab] = self._number
            tabs.move_to_end(tab)
            if len(tabs) > MAX_TABS:
                tabs.popitem(last=False)
            if sum(map(len, self._turns.values())) > MAX_CHATS:
                self._drop_oldest_chat()
        self._wake()

    def _drop_oldest_chat(self) -> None:
        # Drop a chat of the owner with the most chats, so that only pages of that owner may have to reload.
        owner = max(self._turns, key=lambda each: len(self._turns[each]))
        _, dropped = self._turns[owner].popitem(last=False)
        self._dropped[owner] = max(dropped.values())
        if not self._turns[owner]:
            del self._turns[owner]

    def invalidate_revisions(self) -> None:
        self._process_id = secrets.token_hex(4)
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def since(self, revision: str, owner: str, chat_id: str, tab: str) -> list[str]:
        """Return what to reload: 'chats', 'turns', both or neither."""
        process_id, _, text = revision.partition("-")
        if process_id != self._process_id or not text.isascii() or not text.isdecimal() or len(text) > 15:
            return ["chats", "turns"]  # malformed, invalidated, or from an earlier server process
        number = int(text)
        events = ["chats"] if self._lists.get(owner, 0) > number else []
        chats: Mapping[str, Mapping[str, int]] = self._turns.get(owner, {})
        by_others = (at for other, at in chats.get(chat_id, {}).items() if other != tab or not tab)
        may_be_dropped = chat_id not in chats and self._dropped.get(owner, 0) > number
        if max(by_others, default=0) > number or may_be_dropped:
            events.append("turns")
        return events

    async def wait(self, revision: str, seconds: float) -> bool:
        if revision != self.revision or self.closed:
            return True
        try:
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        except TimeoutError:
            return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


PING_SECONDS = 15.0
MAX_ENCODED = 16  # number of encoded updates cached per log, one per reader position and language


def parse_last_event_id(header: str | None) -> int | None:
    """Parse `Last-Event-ID`. Return None if it is missing or malformed."""
    if header is None or not header.isascii() or not header.isdecimal() or len(header) > 15:
        return None
    return int(header)


async def turn_events(message_id: str, log: TurnLog, after: int | None) -> AsyncIterator[bytes]:
    """Yield all updates after number `after` (beginning with a snapshot if it is None), then the final events."""
    yield format_sse_event(comment="attached")
    position = ReaderPosition(after)
    with log.reading():
        while True:
            events, position = _next_events(message_id, log, position)
            yield events
            number = position.number or 0
            if log.finished and number == log.number:
                break
            while not await log.wait(number, PING_SECONDS):
                yield format_sse_event(comment="ping")
    if log.stats:
        yield _named_event("usage", message_id, number, **log.stats)
    if log.error is not None:
        yield _named_event("error", message_id, number, message=log.error, retryable=True)
    yield _named_event("done", message_id, number, state=log.status.phase)


def _next_events(message_id: str, log: TurnLog, position: ReaderPosition) -> tuple[bytes, ReaderPosition]:
    # Readers with the same position and page language share the encoded events.
    key = position, language.get()
    if key not in log.encoded:
        if len(log.encoded) == MAX_ENCODED:
            log.encoded.clear()
        log.encoded[key] = _encode_update(message_id, log, position)
    return log.encoded[key]


def _encode_update(message_id: str, log: TurnLog, position: ReaderPosition) -> tuple[bytes, ReaderPosition]:
    update = log.since(position.number)
    status = update.status
    is_new_phase, events = position.phase != status.phase, list[bytes]()
    if is_new_phase and position.phase is not None:
        # Send the new phase before its first words, so that the page collapses the reasoning while nothing is below it.
        # The event has the previous update's number, because this update has not been sent yet.
        events.append(_named_event("status", message_id, position.number, state=status.phase, label=status.label))
    announcement = announcement_html(status.phase, log.words) if is_new_phase else ""
    if position.number != update.number or position.phase is None:
        events.append(format_sse_event(data_str=update_html(message_id, update) + announcement, id=str(update.number)))
    if position.phase is None:
        events.append(_named_event("status", message_id, update.number, state=status.phase, label=status.label))
    if position.asking != update.asking and (position.asking is not None or log.cards):
        events.append(_named_event("tool", message_id, update.number, call=update.asking))
    progress = tuple(status.progress.items()) or position.progress
    if progress != position.progress:
        events.append(_named_event("progress", message_id, update.number, phase=status.phase, **status.progress))
    return b"".join(events), ReaderPosition(update.number, status.phase, update.asking, progress)


async def feed_events(
    feed: Feed,
    after: str,
    owner: str,
    chat_id: str,
    tab: str,
    *,
    numbered: bool = True,  # False for events within another numbered stream
) -> AsyncIterator[bytes]:
    # The first check includes this tab's own changes, because they may be newer than the page.
    revision, changed = feed.revision, feed.since(after, owner, chat_id, tab="")
    yield format_sse_event(comment="attached")
    while not feed.closed:
        for event in changed:
            yield format_sse_event(event=event, data_str="{}", id=revision if numbered else None)
        if not await feed.wait(revision, PING_SECONDS):
            yield format_sse_event(comment="ping")
        previous, revision = revision, feed.revision
        changed = feed.since(previous, owner, chat_id, tab)


async def merge_streams(events: AsyncIterator[bytes], others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # One merged stream saves each page a second connection.
    reading = {asyncio.ensure_future(anext(each, None)): each for each in (events, others)}
    try:
        while events in reading.values():
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                source = reading.pop(read)
                if (event := read.result()) is not None:
                    yield event
                    reading[asyncio.ensure_future(anext(source, None))] = source
    finally:
        for read in reading:
            read.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


STORED_NUMBER = 10**14
"""First number of a log that is built from a stored answer. All numbers in the original log are smaller, so a reader
that resumes after an update of the original log receives a snapshot."""


def finished_log(message: StoredMessage, answer_html: str, reasoning_html: str) -> TurnLog:
    log = TurnLog(STORED_NUMBER)
    log.write("reasoning", reasoning_html, "")
    log.write("answer", answer_html, "")
    log.words = len(message.content.split())
    error = message.note if message.state == "failed" else None
    log.finish(message.state, words[f"phase_{message.state}"], error, asdict(message.numbers))
    return log


def _named_event(event: str, message_id: str, number: int | None, **data: str | bool | Stat) -> bytes:
    return format_sse_event(event=event, data_str=json.dumps({"message": message_id, **data}), id=str(number))


SNAPSHOT_MARK = "<!--snapshot-->"
"""First bytes of an update that replaces all content. The page applies it even if the event's number is not new."""


def update_html(message_id: str, update: Update) -> str:
    """Render one update; model output in it is already sanitized."""
    parts = [SNAPSHOT_MARK] if update.snapshot else []
    for name, channel in update.channels.items():
        target = f"#msg-{message_id}-{name}"
        is_new = update.snapshot or bool(channel.append)
        if is_new:
            swap = "innerHTML" if update.snapshot else "beforeend"
            parts.append(_partial(f"{target}-closed", swap, translate_labels(channel.append)))
        if channel.tail is not None:
            # After a block is closed, the tail is a different block. Morphing would keep elements of the old block.
            swap = "innerHTML" if is_new else "innerMorph"
            parts.append(_partial(f"{target}-tail", swap, translate_labels(channel.tail)))
    for card_id, card in update.cards.items():
        parts.append(_partial(f"#call-{card_id}-state", "innerHTML", card.state))
        parts.append(_partial(f"#call-{card_id}-result", "innerHTML", card.result))
    status = update.status
    label = f'<span data-phase="{status.phase}">{escape(status.label)}</span>'
    parts.append(_partial("#status-label", "innerHTML", label))
    if status.reasoning_label:
        parts.append(_partial(f"#msg-{message_id}-reasoning-label", "textContent", escape(status.reasoning_label)))
    parts.append(_partial(f"#msg-{message_id}-progress", "textContent", escape(status.detail)))
    return "".join(parts)


def announcement_html(phase: str, answer_words: int) -> str:
    sentence = words.get(f"announce_{phase}", "").format(count=number(answer_words))
    return _partial("#announcer", "textContent", escape(sentence)) if sentence else ""


def _partial(target: str, swap: str, html: str) -> str:
    return f'<hx-partial hx-target="{target}" hx-swap="{swap}">{html}</hx-partial>'
