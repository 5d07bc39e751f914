"""Exchange messages and logs through a Valkey server.

One stream (the bus) contains the messages to all replicas, and each published log has its own stream. One connection
sends data, with a single round trip for everything that is waiting. Another connection reads the bus and the streams of
the logs that this replica copies. While the Valkey server is unreachable, messages wait. When it is reachable again,
each replica sends whole logs, and calls the functions in `at_gap`. Therefore, the Valkey server may even lose all its
data.

`ValkeyCounters` counts requests across all replicas, with the scripts of the `limits` library. While the Valkey server
is unreachable, each replica counts separately, so N replicas admit up to N times the limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from valkey.asyncio import BlockingConnectionPool, Valkey
from valkey.exceptions import ValkeyError

from notso.web.edge.rate_limit import Counters, LocalCounters
from notso.web.replicas.exchange import ApplyChanges, Body, ChangeLog, Subscriber

logger = logging.getLogger("notso.web.replicas")

FAILURES = (ValkeyError, OSError, TimeoutError)
ANSWER_SECONDS = 2.0
"""Timeout after which the Valkey server is considered unreachable."""
BLOCK_SECONDS = 1.0
CANCEL_SECONDS = 0.5
RETRY_SECONDS = 0.25
SEND_SECONDS = 0.05
"""Delay before messages are sent, so that they are batched, and follow the HTTP response to their request."""
READ_SECONDS = 0.005
CLOSE_SECONDS = 1.0
MAX_MESSAGES = 10_000
"""Maximum number of messages in the bus on the Valkey server, and of messages and values waiting to be sent to it."""
MOST_FINISHED = 256
KEEP_SECONDS = 900
KEEP_FINISHED_SECONDS = 300
CLAIM_SECONDS = 6
RENEW_SECONDS = 2.0
WHOLE_BYTES = 65_536
"""A log's stream contains a copy of the whole log, and later changes. If the changes exceed WHOLE_BYTES plus four times
the copy's size, a new copy replaces both."""

Entry: TypeAlias = tuple[bytes, dict[bytes, bytes]]


@dataclass(slots=True)
class _Published:
    log: ChangeLog
    key: str
    sent: int = -1  # number of the last change in the Valkey server's stream; -1: the whole log must be sent
    whole_bytes: int = 0  # size of the last copy of the whole log
    more_bytes: int = 0  # size of the changes sent since that copy

    def after(self) -> int:
        return -1 if self.more_bytes > 4 * self.whole_bytes + WHOLE_BYTES else self.sent


@dataclass(slots=True, eq=False)
class _Copy:
    apply_changes: ApplyChanges
    at: tuple[int, int] = (0, 0)  # id of the last entry that has been applied


class ValkeyExchange:
    """Exchange at a URL such as valkey://[[user]:password@]host[:port][/database]."""

    # URL schemes: `valkey` or `redis`; with TLS, `valkeys` or `rediss`; for a socket, `unix`.

    is_shared = True

    def __init__(self, url: str) -> None:
        self._replica = secrets.token_hex(8)
        self._bus, self._bell = "notso:bus", f"notso:bell:{self._replica}"
        self._client = Valkey.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        self._reader = Valkey.from_url(
            url, socket_timeout=BLOCK_SECONDS + ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS
        )
        self._outbox: deque[bytes] = deque(maxlen=MAX_MESSAGES)
        self._unsaved: dict[str, tuple[str, int]] = {}  # values to send again: key -> (value, lifetime)
        self._published: dict[str, _Published] = {}
        self._changed: dict[str, None] = {}
        self._subscribers: dict[str, list[Subscriber]] = {}
        self._copies: dict[str, list[_Copy]] = {}
        self._claims: dict[str, str] = {}
        self._renewing = asyncio.Lock()
        self.at_gap: list[Callable[[], None]] = []
        self._at: bytes | None = None
        self._bell_at = b"0-0"
        self._should_ring_bell = False
        self._may_have_missed = False
        self.is_unreachable = False
        self._work = asyncio.Event()
        self._returned = asyncio.Event()  # set when the Valkey server is reachable again
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, kind: str, **body: Any) -> None:
        self._outbox.append(_as_json({"from": self._replica, "kind": kind, **body}))
        self._work.set()

    def subscribe(self, kind: str, subscriber: Subscriber) -> None:
        self._subscribers.setdefault(kind, []).append(subscriber)

    def publish(self, name: str, log: ChangeLog) -> None:
        self._published[name] = _Published(log, f"notso:log:{name}")
        log.at_change = lambda: self._note_change(name)
        self._note_change(name)

    @contextmanager
    def following(self, name: str, apply_changes: ApplyChanges) -> Iterator[None]:
        key, copy = f"notso:log:{name}", _Copy(apply_changes)
        self._copies.setdefault(key, []).append(copy)
        # The reading connection may be blocked in a read that does not include the new stream. A new entry in the bell
        # (a stream that only this replica reads) ends this read. The next read includes the new stream.
        self._should_ring_bell = True
        self._work.set()
        try:
            yield
        finally:
            self._copies[key].remove(copy)
            if not self._copies[key]:
                del self._copies[key]

    async def claim(self, name: str, holder: str) -> str:
        key = f"notso:claim:{name}"
        try:
            while not await self._client.set(key, holder, nx=True, ex=CLAIM_SECONDS):
                found = await self._client.get(key)
                if found is not None:  # None if the claim has just ended
                    if found.decode() != holder:
                        return str(found.decode())
                    break
        except FAILURES as error:
            self._mark_unreachable(error)
            # Send something, so that an idle replica notices when the Valkey server is reachable again.
            self._should_ring_bell = True
            self._work.set()
        self._claims[name] = holder
        return ""

    def release(self, name: str) -> None:
        if self._claims.pop(name, None) is not None:
            self._forget_soon(f"notso:claim:{name}")

    async def is_claimed(self, name: str) -> bool:
        try:
            return bool(await self._client.exists(f"notso:claim:{name}"))
        except FAILURES:
            return True

    async def set_value(self, name: str, value: str, seconds: float) -> None:
        # Queue the value first, so that it is not lost if this call is canceled. Queuing it after a failure could
        # overwrite a newer value that another call has stored in the meantime.
        key, unsaved = f"notso:value:{name}", (value, max(1, int(seconds)))
        self._unsaved.pop(key, None)
        self._unsaved[key] = unsaved
        if len(self._unsaved) > MAX_MESSAGES:
            del self._unsaved[next(iter(self._unsaved))]
        try:
            with suppress(*FAILURES):
                if self.is_unreachable:  # the task that sends the messages tries again
                    return
                await self._client.set(key, value, ex=unsaved[1])
                if self._unsaved.get(key) is unsaved:
                    del self._unsaved[key]
        finally:
            if key in self._unsaved:
                self._work.set()

    async def get_value(self, name: str, if_unreachable: str | None = None) -> str | None:
        key = f"notso:value:{name}"
        if key in self._unsaved:
            return self._unsaved[key][0]
        try:
            found = await self._client.get(key)
        except FAILURES:
            return if_unreachable
        return found.decode() if found is not None else None

    def start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(each()) for each in (self._send, self._receive, self._renew)]

    async def close(self) -> None:
        pending = set(self._tasks)
        # Cancel repeatedly: the client uses asyncio.wait_for, which may lose a cancellation in Python 3.11.
        while pending:
            for task in pending:
                task.cancel()
            done, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
            await asyncio.gather(*done, return_exceptions=True)
        with suppress(*FAILURES):
            async with asyncio.timeout(CLOSE_SECONDS):
                if not self.is_unreachable:
                    await self._flush()
                    await self._client.delete(self._bell, *(f"notso:claim:{name}" for name in self._claims))
        for client in (self._client, self._reader):
            with suppress(*FAILURES):
                await client.aclose()

    def _note_change(self, name: str) -> None:
        self._changed[name] = None
        self._work.set()

    def _forget_soon(self, key: str) -> None:
        task = asyncio.create_task(self._delete(key))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _delete(self, key: str) -> None:
        async with self._renewing:  # wait for a running renewal, which could store the claim again
            pass
        with suppress(*FAILURES):
            await self._client.delete(key)

    async def _send(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(SEND_SECONDS)
            self._work.clear()
            try:
                await self._flush()
            except FAILURES as error:
                self._mark_unreachable(error)
                await asyncio.sleep(RETRY_SECONDS)
                self._work.set()
            else:
                self._mark_reachable()

    async def _flush(self) -> None:
        # Send all messages and changes in one round trip. If it fails, they are sent again: receivers ignore changes
        # that they already have, and repeated messages are harmless.
        messages, ring_bell = list(self._outbox), self._should_ring_bell
        names = [name for name in self._changed if name in self._published]  # a log may change after its removal
        self._changed.clear()
        pipe, values = self._client.pipeline(transaction=False), dict(self._unsaved)
        for key, (value, lifetime) in values.items():  # values come first, because messages may refer to them
            pipe.set(key, value, ex=lifetime)
        for body in messages:
            pipe.xadd(self._bus, {b"json": body}, maxlen=MAX_MESSAGES, approximate=True)
        sent: list[tuple[_Published, int, int, bool]] = []
        for name in names:
            each = self._published[name]
            after, number, finished = each.after(), each.log.number, each.log.finished
            body = _as_json({"after": after, "number": number, "finished": finished, **each.log.changes(after)})
            if after < 0:
                pipe.xadd(each.key, {b"json": body}, maxlen=1, approximate=False)
            else:
                pipe.xadd(each.key, {b"json": body}, nomkstream=True)
            pipe.expire(each.key, KEEP_FINISHED_SECONDS if finished else KEEP_SECONDS)
            sent.append((each, number, len(body), after < 0))
        if ring_bell:
            pipe.xadd(self._bell, {b"json": b"{}"}, maxlen=1, approximate=False)
            pipe.expire(self._bell, KEEP_SECONDS)
        try:
            results = await pipe.execute()
        except BaseException:
            for each, *_ in sent:
                each.sent = -1
            self._changed |= dict.fromkeys(names)
            self._drop_old()
            raise
        self._should_ring_bell = self._should_ring_bell and not ring_bell
        for key, saved in values.items():
            if self._unsaved.get(key) is saved:
                del self._unsaved[key]
        for body in messages:
            if self._outbox and self._outbox[0] is body:  # a full queue may have dropped it meanwhile
                self._outbox.popleft()
        added_at = len(values) + len(messages)
        for name, (each, number, size, is_whole), added in zip(names, sent, results[added_at::2], strict=False):
            each.sent = number if added is not None else -1  # None: the Valkey server has lost the log's stream
            each.whole_bytes, each.more_bytes = (size, 0) if is_whole else (each.whole_bytes, each.more_bytes + size)
            if each.sent < 0 or each.sent != each.log.number:
                self._note_change(name)
            elif each.log.finished and self._published.get(name) is each:
                del self._published[name]

    def _drop_old(self) -> None:
        # Limit the number of finished logs that could not be sent. Other replicas find the answers in the database.
        finished = [name for name, each in self._published.items() if each.log.finished]
        for name in finished[: max(0, len(finished) - MOST_FINISHED)]:
            del self._published[name]
            self._changed.pop(name, None)

    async def _receive(self) -> None:
        while True:
            try:
                await self._read()
                await asyncio.sleep(READ_SECONDS)
            except FAILURES as error:
                self._mark_unreachable(error)
                self._may_have_missed = True
                await asyncio.sleep(RETRY_SECONDS)

    async def _read(self) -> None:
        if self._at is None:
            last: list[Entry] = await self._reader.xrevrange(self._bus, count=1)
            self._at = last[0][0] if last else b"0-0"
        streams: dict[Any, Any] = {self._bus: self._at, self._bell: self._bell_at}
        for key, copies in self._copies.items():
            streams[key] = b"%d-%d" % min(each.at for each in copies)
        found = await self._reader.xread(streams, block=int(1000 * BLOCK_SECONDS))
        if self._may_have_missed:
            self._may_have_missed = False
            self._mark_reachable()
            for callback in self.at_gap:
                callback()
        for key, entries in found or ():
            self._handle_entries(key.decode(), entries)

    def _handle_entries(self, key: str, entries: list[Entry]) -> None:
        last = entries[-1][0]
        if key == self._bell:
            self._bell_at = last
        elif key == self._bus:
            self._at = last
            for body in _bodies(entries):
                if body.get("from") != self._replica:
                    for subscriber in self._subscribers.get(str(body.get("kind")), ()):
                        _call_logged(subscriber, body)
        for copy in list(self._copies.get(key, ())):
            new = [entry for entry in entries if _number(entry) > copy.at]
            copy.at = _number(entries[-1])
            if not all(_call_logged(copy.apply_changes, body) for body in _bodies(new)):
                copy.at = 0, 0

    async def _renew(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._returned.wait()
            self._returned.clear()
            async with self._renewing:
                with suppress(*FAILURES):
                    pipe = self._client.pipeline(transaction=False)
                    for name, holder in self._claims.items():
                        # Store the claim again if the Valkey server has lost it.
                        pipe.set(f"notso:claim:{name}", holder, ex=CLAIM_SECONDS, nx=True)
                        pipe.expire(f"notso:claim:{name}", CLAIM_SECONDS)
                    await pipe.execute()

    def _mark_unreachable(self, error: BaseException) -> None:
        if not self.is_unreachable:
            logger.warning("Valkey is unreachable; this replica continues alone: %s", error or type(error).__name__)
        self.is_unreachable = True

    def _mark_reachable(self) -> None:
        if self.is_unreachable:
            logger.warning("Valkey is reachable again")
            self._returned.set()
        self.is_unreachable = False


def _number(entry: Entry) -> tuple[int, int]:
    milliseconds, _, more = entry[0].partition(b"-")
    return int(milliseconds), int(more)


def _as_json(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _bodies(entries: list[Entry]) -> Iterator[Body]:
    for _, fields in entries:
        try:
            body = json.loads(fields[b"json"])
        except (KeyError, ValueError):
            continue  # written by another program
        if isinstance(body, dict):
            yield body


def _call_logged(handler: Callable[[Body], bool | None], body: Body) -> bool:
    # After an exception, the message counts as handled: it would fail again, and an exception here would stop the task
    # that reads all messages.
    try:
        return handler(body) is not False
    except Exception:
        logger.exception("another replica sent an invalid message")
        return True


T = TypeVar("T")

COUNTER_ANSWER_SECONDS = 1.0
"""Timeout for counting a request. It is short, because counting delays the request."""
MOST_CONNECTIONS = 4
COUNTER_RETRY_SECONDS = 1.0


class ValkeyCounters:
    """Request counters in Valkey, or in this process while Valkey is unreachable. Use on the event loop."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: Counters = LocalCounters()
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MOST_CONNECTIONS,
            timeout=COUNTER_ANSWER_SECONDS,
            socket_timeout=COUNTER_ANSWER_SECONDS,
            socket_connect_timeout=COUNTER_ANSWER_SECONDS,
        )
        storage = RedisStorage(url, implementation="valkey", key_prefix="notso:limit", connection_pool=pool)  # type: ignore[arg-type]
        self._limiter = MovingWindowRateLimiter(storage)
        self._away_until = float("-inf")
        self._unreachable = False

    async def test(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return await self._with_fallback(lambda each: each.test(limit, what, who))

    async def hit(self, limit: RateLimitItemPerMinute, what: str, who: str) -> bool:
        return await self._with_fallback(lambda each: each.hit(limit, what, who))

    async def free_at(self, limit: RateLimitItemPerMinute, what: str, who: str) -> float:
        async def reset_time(each: MovingWindowRateLimiter | Counters) -> float:
            if isinstance(each, MovingWindowRateLimiter):
                return (await each.get_window_stats(limit, what, who)).reset_time
            return await each.free_at(limit, what, who)

        return await self._with_fallback(reset_time)

    async def _with_fallback(self, query: Callable[[MovingWindowRateLimiter | Counters], Awaitable[T]]) -> T:
        if self._clock() >= self._away_until:
            try:
                result = await query(self._limiter)
            except FAILURES as error:
                if not self._unreachable:
                    logger.warning(
                        "Valkey is unreachable; requests are counted per replica: %s", error or type(error).__name__
                    )
                self._unreachable, self._away_until = True, self._clock() + COUNTER_RETRY_SECONDS
            else:
                self._unreachable = False
                return result
        return await query(self._own)
