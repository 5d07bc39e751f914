"""Limits on the size of requests and responses, the time to receive a request, the total memory for request bodies, and
the open event streams of each owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from fastapi.sse import EventSourceResponse
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.smollm3 import available_memory
from notso.web.edge.connections import ClientConnection, connection_of
from notso.web.edge.security import HttpMiddleware, header_values
from notso.web.values.errors import Problem
from notso.web.values.wording import words


class StreamLimiter:
    """Limits the open event streams of each owner. Use on the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def full(self, owner: str) -> bool:
        return self._open[owner] >= self._most

    def opened(self, owner: str) -> None:
        """Count a stream. Raises Problem (429) at the limit."""
        if self.full(owner):
            raise Problem(429, words["error_streams"], retry_after_seconds=5)
        self._open[owner] += 1

    def closed(self, owner: str) -> None:
        self._open[owner] -= 1
        if self._open[owner] <= 0:
            del self._open[owner]


class CountedStream(EventSourceResponse):
    """Event stream counted in `streams` until it ends. The constructor raises Problem (429) at the limit."""

    def __init__(self, streams: StreamLimiter, owner: str, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._streams, self._owner = streams, owner
        streams.opened(owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.closed(self._owner)


MIB = 1 << 20
MAX_BODY_BYTES = MIB
MAX_FILE_BYTES = 16 * MIB
MAX_REQUEST_BYTES = 24 * MIB
"""Maximum body size of an API request: a file of MAX_FILE_BYTES in Base64 (a third longer), and at least 2 MiB of
conversation."""
LARGER_BODIES = {
    **dict.fromkeys(("/import", "/attachments", "/documents", "/v1/files"), MAX_FILE_BYTES),
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/chat/completions", "/v1/responses", "/responses", "/v1/messages", "/api/chat"),
            *("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", "/v1/responses/input_tokens"),
            *("/v1/messages/count_tokens", "/v1/completions", "/completions", "/completion", "/api/generate"),
            *("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"),
            *(f"/engine/v1/{name}" for name in ("submit", "prepare", "call")),  # whole conversations
        ),
        MAX_REQUEST_BYTES,
    ),
}
"""Maximum body sizes for paths to which MAX_BODY_BYTES does not apply."""

MOST_BYTES = 4 * MAX_REQUEST_BYTES
"""Budget for the total size of the bodies that are being received or parsed."""

SMALL_SHARE = 4
"""Together, the bodies may exceed the budget by 1/SMALL_SHARE of it (the maximum size of one request). Only owners
whose bodies take no more than that may use this extra memory."""

COST = 12
"""Bytes of memory needed per body byte until the response starts, because the body is gathered, copied, parsed and
stored. The measured peak of a 13 MiB import is nine times its size; the rest is a margin for fragmentation."""

MEASURE_SECONDS = 0.1
"""Maximum age in seconds of the measurement of available memory."""

FREE_BYTES = 64 * 1024
"""Leading bytes of each body that are not counted, so that ordinary requests always fit. The connection limit bounds
the total of these bytes."""

FAIR_SECONDS = 2.0
"""Time within which a body must arrive while other bodies wait for memory. The largest import needs a tenth of this
time."""


def available_bytes() -> int:
    """Return how many bytes the process can still allocate within the limits of machine, cgroup and process."""
    return available_memory().available_bytes


class BodyError(Exception):
    """A request's body was refused. RequestLimits sends the response."""


class RequestTooSlowError(BodyError): ...


class RequestTooLargeError(BodyError): ...


class BodyEvictedError(BodyError):
    # A body that arrived too slowly was evicted to make room for others.
    pass


class IncomingBody:
    def __init__(self, budget: BodyBudget, holder: str, limit: int, deadline: float) -> None:
        self.holder = holder  # the owner, or the client's address if the request is not authenticated
        self.held = 0  # bytes counted against the budget
        self.since = 0.0  # event loop time at which the first byte was counted
        self._budget = budget
        self._limit = limit
        self._deadline = deadline
        self._gathered = io.BytesIO()
        self._timeout = asyncio.timeout_at(deadline)
        self._evicted = False

    async def gather(self, receive: Receive) -> Message:
        """Receive the whole body; return it as one message, or return the disconnect message.

        Raises RequestTooLargeError, RequestTooSlowError or BodyEvictedError.
        """
        try:
            async with self._timeout:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return message
                    await self._add(message.get("body", b""))
                    if not message.get("more_body", False):
                        return {"type": "http.request", "body": self._gathered.getvalue(), "more_body": False}
        except TimeoutError:
            raise (BodyEvictedError if self._evicted else RequestTooSlowError) from None
        finally:
            self._gathered = io.BytesIO()
            self._budget.mark_complete(self)

    def evict(self) -> None:
        self._evicted = True
        self._gathered = io.BytesIO()
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self._budget.release(self)

    async def _add(self, piece: bytes) -> None:
        if self._evicted:
            raise BodyEvictedError
        size = self._gathered.tell() + len(piece)
        if size > self._limit:
            raise RequestTooLargeError
        if size > FREE_BYTES:
            await self._budget.hold(self, size - FREE_BYTES)
        self._gathered.write(piece)


class BodyBudget:
    """Memory budget for the bodies of all requests. Use on the event loop."""

    # When the budget is used up, bodies that take longer than FAIR_SECONDS to arrive are evicted: first those of the
    # holder with the most bytes.

    def __init__(self, most_bytes: int = MOST_BYTES, available: Callable[[], int] = available_bytes) -> None:
        self.free = most_bytes
        self._available = available
        self._memory, self._measured_at = 0, float("-inf")
        self._extra = most_bytes // SMALL_SHARE
        self._held = Counter[str]()
        self._arriving: dict[IncomingBody, None] = {}
        self._eviction_lock = asyncio.Lock()
        self._changed = asyncio.Event()

    async def hold(self, arrival: IncomingBody, size: int) -> None:
        """Increase the reservation of a body to `size` bytes. Raises BodyEvictedError if it is evicted."""
        if arrival not in self._arriving:
            self._arriving[arrival] = None
            arrival.since = asyncio.get_running_loop().time()
        if not self._has_room(arrival, size):
            # Only one waiting body at a time looks for others to evict: if all did, the cost would be quadratic.
            async with self._eviction_lock:
                while not self._has_room(arrival, size):
                    await self._evict_or_wait(arrival)
        self.free -= size - arrival.held
        self._memory -= size - arrival.held
        self._held[arrival.holder] += size - arrival.held
        arrival.held = size

    def largest_body_allowed(self) -> int:
        return FREE_BYTES + max(0, self._memory_left() + self._held.total())

    def _has_room(self, arrival: IncomingBody, size: int) -> bool:
        more = size - arrival.held
        extra = self._extra if self._held[arrival.holder] + more <= self._extra else 0
        return more <= min(self.free + extra, self._memory_left())

    def _memory_left(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._measured_at >= MEASURE_SECONDS:
            self._memory, self._measured_at = self._available() // COST, now
        return self._memory

    def mark_complete(self, arrival: IncomingBody) -> None:
        """Mark a body as complete, so that it can no longer be evicted."""
        self._arriving.pop(arrival, None)
        self._notify_waiting()

    def release(self, arrival: IncomingBody) -> None:
        self._arriving.pop(arrival, None)
        self.free += arrival.held
        self._held[arrival.holder] -= arrival.held
        if not self._held[arrival.holder]:
            del self._held[arrival.holder]
        arrival.held = 0
        self._notify_waiting()

    async def _evict_or_wait(self, arrival: IncomingBody) -> None:
        now = asyncio.get_running_loop().time()
        late = [each for each in self._arriving if each.since + FAIR_SECONDS <= now]
        if late:
            # Among bodies of one holder, max() returns the oldest, because `late` begins with the oldest body.
            evicted = max(late, key=lambda each: self._held[each.holder])
            evicted.evict()
            if evicted is arrival:
                raise BodyEvictedError
            return
        first = next(iter(self._arriving))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(first.since + FAIR_SECONDS):
                await self._changed.wait()

    def _notify_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


BODY_SECONDS = 60.0
MAX_HEADER_BYTES = 16 * 1024  # including the request line
PIECE_BYTES = 64 * 1024
"""Bytes of a response per write. The client must read each piece within the send timeout."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Maximum total size of the response bodies being sent in pieces: enough for any page and a few full exports."""
RELEASE_BODY = "notso.release_body"
"""ASGI scope entry: function to call if the body is freed before the response starts."""
RETRY_SECONDS = 5
"""Value of Retry-After if the budget is used up. After this time, the bodies that used it have arrived or can be
evicted."""


class RequestLimits(HttpMiddleware):
    """Rejects oversized headers (431), and bodies that are oversized (413), compressed (415), slow (408) or evicted
    from the budget (503).
    """

    # Only bytes that have been received count against the budget, until the response starts or RELEASE_BODY is called.

    def __init__(self, app: ASGIApp, body_seconds: float = BODY_SECONDS) -> None:
        super().__init__(app)
        self._body_seconds = body_seconds
        self._budget = BodyBudget()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        limit, claimed = _body_limit(scope), _claimed_bytes(scope)
        if claimed > FREE_BYTES:
            limit = min(limit, self._budget.largest_body_allowed())
        deadline = asyncio.get_running_loop().time() + self._body_seconds
        arrival = IncomingBody(self._budget, (scope.get("client") or ("",))[0], limit, deadline)
        scope[RELEASE_BODY] = partial(self._budget.release, arrival)
        started = received = False

        async def receive_body() -> Message:
            nonlocal received
            if received:  # after the body, the client can only disconnect
                return await receive()
            received = True
            caller = scope.get("state", {}).get("caller")
            arrival.holder = f"owner {caller.owner}" if caller is not None else arrival.holder
            return await arrival.gather(receive)

        async def send_noted(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._budget.release(arrival)
            await send(message)

        answer: PlainTextResponse | None = None
        try:
            await self._app(scope, receive_body, send_noted)
        except RequestTooLargeError:
            answer = _too_large(limit)
        except RequestTooSlowError:
            answer = _closing("The body did not arrive in time.\n", 408)
        except BodyEvictedError:
            text = "The server is receiving too much data at once. Please try again in a moment.\n"
            answer = PlainTextResponse(text, 503, {"Retry-After": str(RETRY_SECONDS)})
            # A client that is still sending may not notice the response, so the rest of a small body is received and
            # discarded. For a large body, this would take too long, so the connection is closed.
            if claimed > MAX_BODY_BYTES:
                answer.headers["Connection"] = "close"
        finally:
            self._budget.release(arrival)
        if answer is not None and not started:
            await answer(scope, receive, send)


class ChunkedBodies(HttpMiddleware):
    """Sends large response bodies in pieces and limits their total size.

    Above the limit, it drops the connections of clients that are not reading, starting with the one that stopped
    first.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._held: dict[ClientConnection, int] = {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            connection = connection_of(scope) if len(body) > PIECE_BYTES else None
            if connection is None:
                await send(message)
                return
            self._held[connection] = len(body)
            try:
                for start in range(0, len(body), PIECE_BYTES):
                    more = message.get("more_body", False) or start + PIECE_BYTES < len(body)
                    self._drop_slowest()
                    await send({**message, "body": body[start : start + PIECE_BYTES], "more_body": more})
                    # If the client reads fast, `send` never waits. Without this pause, other requests would starve.
                    await asyncio.sleep(0)
            finally:
                self._held.pop(connection, None)

        await self._app(scope, receive, send_in_pieces)

    def _drop_slowest(self) -> None:
        while sum(self._held.values()) > MAX_HELD_BYTES:
            unread = [(each.unread_since, each) for each in self._held if each.unread_since is not None]
            if not unread:
                return
            longest = min(unread, key=lambda pair: pair[0])[1]
            del self._held[longest]
            longest.drop()


class StrictHttp(HttpMiddleware):
    """Rejects unsupported HTTP versions and ambiguous body lengths, and closes the connection."""

    # The connection cannot be kept, because the start of the next request is uncertain.

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        app: ASGIApp = self._app
        if scope["http_version"] not in ("1.0", "1.1"):
            app = _closing("Only HTTP/1.0 and HTTP/1.1 are supported.\n", 505)
        elif b"transfer-encoding" in names and b"content-length" in names:
            app = _closing("Send Content-Length or Transfer-Encoding, not both.\n", 400)
        await app(scope, receive, send)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    path = scope.get("raw_path") or scope["path"]
    # 13 is the length of two spaces, the question mark, HTTP/1.1 and CRLF.
    request_line = len(scope["method"]) + len(path) + len(scope.get("query_string", b"")) + 13
    if request_line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        return PlainTextResponse("The headers are too large.\n", 431)
    if any(value.lower() != "identity" for value in header_values(scope, b"content-encoding")):
        return PlainTextResponse("Compressed request bodies are not supported.\n", 415)
    for length in header_values(scope, b"content-length"):
        if len(length) > 18 or not length.isdecimal() or int(length) > _body_limit(scope):
            return _too_large(_body_limit(scope))
    return None


def _closing(text: str, status: int) -> PlainTextResponse:
    return PlainTextResponse(text, status, {"Connection": "close"})


def _body_limit(scope: Scope) -> int:
    return LARGER_BODIES.get(scope["path"], MAX_BODY_BYTES)


def _claimed_bytes(scope: Scope) -> int:
    lengths = header_values(scope, b"content-length")
    if lengths:
        return int(lengths[0])
    return _body_limit(scope) if header_values(scope, b"transfer-encoding") else 0  # a chunked body states no length


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"The request is too large: at most {limit:,} bytes are allowed.\n", 413)
