"""Connect a front end to its engine, through HTTP calls and one HTTP response that streams the events of all answers.

A thread reads the stream. If the stream breaks, the thread opens a new one, which continues each answer after the last
event received. After LOST_SECONDS without a stream, or at once if a retry cannot help, the engine is considered lost
and all answers end with an error.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import queue
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.smollm3 import (
    AdapterInfo,
    EngineError,
    EngineLostError,
    EngineStats,
    Event,
    Generation,
    ModelInfo,
    NotsoError,
    Progress,
    PromptEstimate,
    Sentence,
    Usage,
)
from notso.web.engine.remote.wire_values import error_from_wire, from_wire
from notso.web.values.errors import EngineUnavailableError
from notso.web.values.json_steps import json_bytes

T = TypeVar("T", EngineStats, Progress, PromptEstimate, Usage)

logger = logging.getLogger("notso.web.engine")

WIRE_PATH = "/engine/v1"
"""Path of the engine API. Its number changes with every incompatible change of the wire format."""
CONNECT_SECONDS = 3.0
CALL_SECONDS = 120.0
"""Timeout of a call, long enough for the engine to load a model first."""
SILENCE_SECONDS = 5.0
"""Read timeout of the stream. The engine sends at least one line per second."""
LOST_SECONDS = 5.0
RETRY_SECONDS = 0.2
LOST_RETRY_SECONDS = 1.0
MAX_LINE_BYTES = MAX_ANSWER_BYTES = 16 * 1024 * 1024
ANSWER_LIMITS = JsonLimits(depth=64, objects=200_000, values=2_000_000)
"""Limits on the JSON of a call's result, and of a stream line, which contains new events of all answers. The largest
results are the token ids of long prompts."""
MAX_NUMBER = 1 << 53
READ_BYTES = 64 * 1024
SPARE_SECONDS = 3.0
"""A connection that has been idle for longer is not reused, because the server may close it at any moment."""
FAILURES = (OSError, http.client.HTTPException)


class FrontEndRefusedError(EngineError):
    """The engine rejects this front end until the configuration of either server is changed."""


@dataclass(frozen=True, slots=True)
class About:
    # The status that the engine sends in the stream.
    state: str = "loading"  # EngineState of the default model, or `stopping`
    failure: str = ""
    info: ModelInfo | None = None
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)

    @property
    def can_answer(self) -> bool:
        """Whether the engine can answer, possibly after loading a model."""
        return self.info is not None and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.state in ("failed", "stopped", "stopping")


@dataclass(slots=True, eq=False)
class _OpenAnswer:
    generation: Generation
    events: int = 0
    accepted_by: Any = None  # id of the engine's session that accepted the answer


class EngineLink:
    """Connection to an engine. Thread-safe."""

    # `when_changed` is called in the link's thread when the engine is connected or lost, or its `About` changes.

    def __init__(self, url: str, key: str, when_changed: Callable[[], None]) -> None:
        parts = urlsplit(url)
        self.name = f"the engine at {parts.netloc}"
        self._parts = parts
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._when_changed = when_changed
        self._session = secrets.token_hex(16)
        self._last = 0
        self._open: dict[int, _OpenAnswer] = {}
        self._spare: list[tuple[http.client.HTTPConnection, float]] = []
        self._in_use: set[http.client.HTTPConnection] = set()
        self._stream: socket.socket | None = None
        self._resumed: frozenset[int] = frozenset()  # answers that the stream continues
        self._streamed_by: Any = None  # id of the engine's session; None until the stream's first line arrives
        self._steering: queue.Queue[tuple[str, int, socket.socket | None] | None] = queue.Queue()
        self._changed = threading.Condition()
        self._closed = False
        self._tried = False
        self.is_up = False
        self.problem: str = f"{self.name} has not been connected yet"
        self.about = About()
        self.stats = EngineStats()

    def start(self) -> None:
        for work in (self._stream_events, self._send_steering):
            threading.Thread(target=work, name="notso-link", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._steering.put(None)
        self._abort_calls()
        self._end_all_answers(f"the connection to {self.name} was closed")
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> About:
        """Wait until the engine can answer. Raises EngineError if it has failed or is unreachable."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._tried)
            self._changed.wait_for(
                lambda: self._closed or not self.is_up or self.about.can_answer or self.about.has_failed
            )
            about = self.about
            if self.is_up and about.can_answer:
                return about
            raise EngineError(self.problem if not self.is_up else f"{self.name} cannot answer: {self._failure_reason}")

    def _unresponsive_message(self, error: Exception) -> Sentence:
        return Sentence(f"{self.name} does not respond: {_error_reason(error)}", "remote_silent", name=self.name)

    @property
    def _invalid_message(self) -> Sentence:
        message = f"{self.name} sent an invalid message: use the same release on both servers"
        return Sentence(message, "remote_release", name=self.name)

    @property
    def _failure_reason(self) -> str:
        return "it is stopping" if self.about.state == "stopping" else self.about.failure or "it has exited"

    def begin(self, body: Mapping[str, Any]) -> Generation:
        """Start an answer. Raises the same errors as `call`."""
        with self._changed:
            number = self._last = self._last + 1
            generation = Generation(lambda: self._on_steering_requested(number))
            entry = self._open[number] = _OpenAnswer(generation)
        try:
            entry.accepted_by = self.call("submit", {**body, "session": self._session, "number": number})
        except BaseException:
            self._open.pop(number, None)
            self._steer("stop", number)  # the engine may have received the request, although the call failed
            raise
        self._end_lost_answers()  # meanwhile, a new stream from a restarted engine may have been opened
        return generation

    def end_all(self) -> None:
        for each in list(self._open.values()):
            each.generation.stop()
        self._abort_calls()
        self._end_all_answers("the engine was closed")

    def _on_steering_requested(self, number: int) -> None:
        # This runs in the thread that calls the generation's `stop` or `answer_now`, and must not block it.
        entry = self._open.get(number)
        if entry is not None:
            if entry.generation.stop_requested:
                self._steer("stop", number)
            elif entry.generation.answer_requested:
                self._steer("answer_now", number)

    def _steer(self, kind: str, number: int) -> None:
        # The current stream is queued with the command, and is cut if sending fails. A later stream need not be cut,
        # because the request that opened it has repeated the command.
        self._steering.put((kind, number, self._stream))

    def _send_steering(self) -> None:
        while (command := self._steering.get()) is not None:
            kind, number, stream = command
            try:
                self.call("steer", {"session": self._session, kind: [number]})
            except NotsoError as error:
                logger.debug("not sent to the engine: %s", error)
                _cut(stream)  # the request that opens the next stream repeats all commands
            finally:
                self._steering.task_done()

    def call(self, name: str, body: Mapping[str, Any]) -> Any:
        """Call a method of the engine API. Raises the engine's error, or EngineError."""
        data = _encode(body)
        connection, is_fresh = self._acquire_connection()
        try:
            try:
                self._send(connection, name, data)
            except ConnectionError:
                # The engine may have closed a reused connection. An incomplete request cannot have been executed, so it
                # can be sent again.
                if is_fresh or self._closed:
                    raise
                connection.close()
                self._in_use.discard(connection)
                connection = self._connect(CALL_SECONDS)
                self._send(connection, name, data)
            response = self._read_response(connection)
            self._spare.append((connection, time.monotonic()))
        except FAILURES as error:
            connection.close()
            raise EngineUnavailableError(self._unresponsive_message(error)) from None
        except BaseException:
            connection.close()
            raise
        finally:
            self._in_use.discard(connection)
        try:
            answer = _parse_object(response)
            failure = error_from_wire(answer["error"]) if "error" in answer else None
        except (ValueError, RecursionError):
            raise EngineError(self._invalid_message) from None
        if failure is not None:
            raise failure
        return answer.get("result")

    def _send(self, connection: http.client.HTTPConnection, name: str, data: bytes) -> None:
        connection.request("POST", f"{WIRE_PATH}/{name}", data, self._headers)

    def _read_response(self, connection: http.client.HTTPConnection) -> bytes:
        response = connection.getresponse()
        body, ends = bytearray(), time.monotonic() + CALL_SECONDS
        while data := response.read1(READ_BYTES):
            body += data
            if len(body) > MAX_ANSWER_BYTES:
                raise EngineError(f"{self.name} sent too much data")
            if time.monotonic() > ends:
                raise TimeoutError
        if response.length:  # read1 does not raise an error if the connection breaks
            raise http.client.IncompleteRead(bytes(body), response.length)
        response.close()  # read1 leaves the response open, which would prevent reuse of the connection
        self._raise_for_status(response)
        if not body:  # http.client accepts truncated headers, even without Content-Length
            raise http.client.IncompleteRead(b"")
        return bytes(body)

    def _acquire_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        while self._spare:
            try:
                connection, used = self._spare.pop()
            except IndexError:  # another thread took the last idle connection
                break
            if time.monotonic() - used < SPARE_SECONDS and not _was_closed(connection):
                self._in_use.add(connection)
                return connection, False
            connection.close()
        try:
            return self._connect(CALL_SECONDS), True
        except FAILURES as error:
            raise EngineUnavailableError(self._unresponsive_message(error)) from None

    def _connect(self, silence_s: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_SECONDS, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(silence_s)
        self._in_use.add(connection)
        return connection

    def _abort_calls(self) -> None:
        # Shutting down the socket makes a call that waits for a response fail at once.
        for connection in list(self._in_use):
            _cut(connection.sock)

    def _raise_for_status(self, response: http.client.HTTPResponse) -> None:
        if response.status == 200:
            return
        reason = {
            401: "requires a different key: NOTSO_ENGINE_KEY must be the same on both servers",
            404: "has no engine API: start it with --engine-api, and use the same release on both servers",
            421: f"does not allow this host name: start it with --allow-host {self._parts.hostname}",
        }.get(response.status, f"answers with HTTP {response.status}")
        kind = EngineUnavailableError if response.status >= 500 else EngineError  # for example, 502 from a proxy
        raise (FrontEndRefusedError if response.status in (401, 404, 421) else kind)(f"{self.name} {reason}")

    def _stream_events(self) -> None:
        broken = time.monotonic()
        while not self._closed:
            began, is_final = time.monotonic(), False
            problem: str = Sentence(f"{self.name} has closed the connection", "remote_closed", name=self.name)
            try:
                for line in self._read_lines():
                    self._handle_line(line)
                    broken = 0.0
            except FAILURES as error:
                problem = self._unresponsive_message(error)
            except FrontEndRefusedError as error:
                problem, is_final = error.sentence, True
            except EngineError as error:
                problem = error.sentence
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                logger.warning("invalid message from %s: %s: %.200s", self.name, type(error).__name__, error)
                problem, is_final = self._invalid_message, True
            broken = broken or time.monotonic()
            if not self._closed:
                self._record_failure(problem, is_final or time.monotonic() - broken >= LOST_SECONDS)
                retry_at = began + (RETRY_SECONDS if self.is_up else LOST_RETRY_SECONDS)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, max(0.0, retry_at - time.monotonic()))

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        # Open the stream and yield its lines. Raises one of FAILURES, EngineError or ValueError.
        connection = self._connect(SILENCE_SECONDS)
        self._stream = connection.sock  # set before `body` collects the commands, so that none is missed
        try:
            with self._changed:
                open_now, last = sorted(self._open.items()), self._last
                # Events may arrive before the response to the request that starts the answer.
                read = {number: each.events for number, each in open_now if each.accepted_by or each.events}
                self._resumed, self._streamed_by = frozenset(read), None
            body = {
                "session": self._session,
                "up_to": last,
                "read": {str(number): events for number, events in read.items()},
                "pending": [number for number, _ in open_now if number not in read],
                "stop": [number for number, each in open_now if each.generation.stop_requested],
                "answer_now": [number for number, each in open_now if each.generation.answer_requested],
            }
            path = f"{WIRE_PATH}/events"
            connection.request("POST", path, json.dumps(body).encode(), self._headers)
            response = connection.getresponse()
            self._raise_for_status(response)
            buffered, searched = bytearray(), 0
            while data := response.read1(READ_BYTES):
                buffered += data
                while (end := buffered.find(b"\n", searched)) >= 0:
                    line = bytes(buffered[:end])
                    del buffered[: end + 1]
                    searched = 0
                    yield _parse_object(line)
                searched = len(buffered)
                if searched > MAX_LINE_BYTES:
                    raise ValueError("a line is too long")
        finally:
            connection.close()
            self._in_use.discard(connection)

    def _handle_line(self, line: dict[str, Any]) -> None:
        if "error" in line:
            raise EngineError(error_from_wire(line["error"]).sentence)
        if "known" in line:
            with self._changed:
                self._streamed_by = line.get("id", True)  # older releases send no id, and their `submit` returns True
            self._end_lost_answers(self._resumed.difference(line["known"]))
        if "stats" in line:
            self.stats = validate_numbers(from_wire(EngineStats, line["stats"]))
        for number, (after, events) in line.get("answers", {}).items():
            entry = self._open.get(int(number))
            if entry is None:
                continue
            new_events = [_validate_event(from_wire(Event, each)) for each in events]
            if after != entry.events:
                raise ValueError("events are missing")
            entry.events += len(new_events)
            is_last = bool(new_events) and new_events[-1].kind in ("end", "error")
            if is_last:
                self._open.pop(int(number), None)
            entry.generation.write(new_events, last=is_last)
        if "about" in line:
            self._set_status(from_wire(About, line["about"]))

    def _set_status(self, about: About) -> None:
        with self._changed:
            before, was_up = self.about, self.is_up
            self.about, self.is_up, self._tried = about, True, True
            self._changed.notify_all()
        if about != before or not was_up:
            self._when_changed()

    def _record_failure(self, problem: str, is_lost: bool) -> None:
        # While `is_up`, a broken stream is not logged or reported until the engine is considered lost: after
        # LOST_SECONDS, or at once if a retry cannot help.
        was_up = self.is_up
        if problem != self.problem and (is_lost or not was_up):
            logger.warning("%s", problem)
        if is_lost or not was_up:
            with self._changed:
                self.problem, self.is_up, self._tried = problem, False, True
                self._changed.notify_all()
        if is_lost and was_up:
            self._abort_calls()
            # Report that the engine is lost before ending its answers. Code that retries an answer then waits until an
            # engine is available.
            self._when_changed()
            self._end_all_answers(problem)

    def _end_lost_answers(self, unknown: frozenset[int] = frozenset()) -> None:
        # A restarted engine accepts answers only once the stream has been opened again. Before that, `_streamed_by` is
        # reset under this lock, so an answer accepted by the new session is never compared with the old id.
        with self._changed:
            lost = {
                number
                for number, each in list(self._open.items())
                if each.accepted_by and self._streamed_by and each.accepted_by != self._streamed_by
            }
        for number in lost | unknown:
            if (entry := self._open.pop(number, None)) is not None:
                reason = f"{self.name} was restarted, and its running responses are lost"
                _fail_answer(entry, Sentence(reason, "remote_restarted", name=self.name))

    def _end_all_answers(self, reason: str) -> None:
        for number in list(self._open):
            if (entry := self._open.pop(number, None)) is not None:
                _fail_answer(entry, reason)


def _cut(connection: socket.socket | None) -> None:
    # Not SSLSocket.shutdown: it would end the encryption first, and another thread could then send unencrypted data.
    if connection is not None:
        with contextlib.suppress(OSError):  # already closed
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.sock, selectors.EVENT_READ)
            # Between calls, the engine sends nothing: if the socket is readable, the engine has closed the connection.
            return bool(selector.select(0))
    except (OSError, ValueError):  # this end has closed the connection
        return True


def _fail_answer(entry: _OpenAnswer, reason: str) -> None:
    entry.generation.write([Event("error", error=EngineLostError(reason))], last=True)


def validate_numbers(value: T) -> T:
    """Return `value`. Raises ValueError if a number in it is negative, NaN or too large."""
    for field_ in fields(value):
        number = getattr(value, field_.name)
        if isinstance(number, int | float) and not 0 <= number < MAX_NUMBER:  # true for NaN, too
            raise ValueError(f"{field_.name} is not a count")
    return value


def _validate_event(event: Event) -> Event:
    for name in _CARRIED.get(event.kind, ()):
        if getattr(event, name) is None:
            raise ValueError(f"a {event.kind} without {name}")
    if event.usage is not None:
        validate_numbers(event.usage)
    if event.progress is not None:
        validate_numbers(event.progress)
    counts = (event.place, event.dropped_messages, event.limit, *event.token_ids)
    if not all(0 <= each < MAX_NUMBER for each in counts):
        raise ValueError("an invalid position or count")
    calls = [call for call in (event.tool_call, event.begun_call) if call is not None]
    for text in (event.text, event.stop or "", *(part for call in calls for part in (call.id, call.name))):
        text.encode()  # raises ValueError for a lone surrogate
    for call in calls:
        call.arguments.encode()
    return event


_CARRIED = {
    "tool_call_part": ("begun_call",),
    "tool_call": ("tool_call",),
    "progress": ("progress",),
    "usage": ("usage",),
    "error": ("error",),
    "end": ("finish_reason",),
}


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        # Unlike json.dumps, this lets other threads run, and does not escape non-ASCII characters. An escaped body
        # could exceed the size limit.
        return json_bytes(body, allow_nan=True)
    except UnicodeEncodeError:  # the text contains a lone surrogate, for which the engine returns an error
        return json.dumps(body).encode()


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        check_shape(text, ANSWER_LIMITS)
    except JsonShapeError as error:
        raise ValueError(str(error)) from None
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _error_reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it closed the connection"
