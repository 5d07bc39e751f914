"""Run a plugin in a process of its own: calls have deadlines, and the process is killed if it misses one.

Plugins run in processes, because a thread in an endless loop cannot be stopped. The cost is one process start per
plugin and one round trip per call (see docs/plugins.md for measurements).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

from notso.plugins import wire
from notso.plugins.errors import PluginError, PluginRefusalError
from notso.plugins.loading import list_installed
from notso.plugins.offers import NAME, NAME_RULE, is_valid_result, validate_offer
from notso.system.confinement import Rights, environment

RowFunction = Callable[[memoryview, memoryview], bytes]
State = Literal["starting", "on", "off"]

START_SECONDS = 60.0  # timeout for loading a plugin, which imports its libraries
SEND_SECONDS = 2.0  # timeout for sending a call; only a hanging process exceeds it
ROW_SECONDS = 2.0  # timeout for processing a row (the logits of one token); all answers wait meanwhile
# Processing rows delays all answers, so a plugin may spend at most ROW_SHARE of the time on it, plus bursts of at most
# ROW_ALLOWANCE_SECONDS.
ROW_ALLOWANCE_SECONDS, ROW_SHARE = 5.0, 0.8
MAX_CALLS = 64
# A plugin that prints more than MAX_PRINTED_BYTES is disabled. At most MAX_PRINTED_LINES of its lines are logged.
MAX_PRINTED_BYTES, MAX_PRINTED_LINES = 1 << 20, 20
SERVER_ENDS = "the server is stopping"
_log = logging.getLogger("notso.plugins")


@dataclass(eq=False)
class _Call:
    kind: str
    what: str
    deadline: float
    seconds: float
    future: Future[Any]


class PluginProcess:
    """The process of an enabled plugin. Thread-safe. Callers never wait without a timeout."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: State = "off"
        self.failure = ""
        """Reason why the plugin is disabled."""
        self.printed_lines = 0
        self.offer: Mapping[str, Any] = {}
        self.left_out: list[str] = []
        """Messages about invalid parts of the plugin's offer (see offers.py)."""
        self._lock = threading.Lock()  # guards state and calls
        self._sending = threading.Lock()
        self._row_lock = threading.Lock()
        self._call_ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self.ready = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._wait_seconds, self._wait_updated = 0.0, time.monotonic()

    def start(self) -> None:
        with self._lock:
            if self.state != "off":
                return
            self.failure, self.offer, self.printed_lines = "", {}, 0
            self.left_out = []
            self.ready.clear()
            try:
                self._launch()
            except (OSError, RuntimeError) as error:  # for example, out of descriptors, processes or threads
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self.state, self.failure = "off", f"it could not be started: {reason}"
                self.ready.set()

    def _launch(self) -> None:
        with contextlib.ExitStack() as after_launch, contextlib.ExitStack() as on_failure:
            connection, child_connection = socket.socketpair()
            on_failure.callback(connection.close)
            after_launch.callback(child_connection.close)
            memory = wire.create_shared_file()
            after_launch.callback(os.close, memory)
            mapping = mmap.mmap(memory, wire.SHARED_BYTES)
            on_failure.callback(mapping.close)
            process = subprocess.Popen(
                [sys.executable, "-m", "notso.plugins.child", self.name, str(child_connection.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_connection.fileno(), memory),
                env=environment(Rights.FILES_AND_NETWORK) | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            on_failure.callback(_kill_process, process)
            connection.settimeout(SEND_SECONDS)
            self._connection, self._memory, self._process = connection, mapping, process
            self._started = time.monotonic()
            self.state = "starting"
            threading.Thread(
                target=self._listen, args=(process, connection), name=f"notso-plugin-{self.name}", daemon=True
            ).start()
            on_failure.pop_all()

    def ask(self, kind: str, arguments: Mapping[str, Any], what: str, seconds: float) -> Future[Any]:
        """Start a call and return its future, which may raise PluginRefusalError or PluginError.

        If the call takes more than `seconds`, the plugin is disabled. Raises PluginError if the plugin is starting,
        disabled or overloaded, or cannot receive `arguments`.
        """
        try:
            number = next(self._call_ids)
            data = wire.encode_packet({"id": number, "kind": kind, "given": arguments})
        except ValueError as error:
            raise self._error(f"cannot receive this value: {error}") from None
        future: Future[Any] = Future()
        with self._lock:
            if self.state != "on":
                raise self._error("is not ready yet" if self.state == "starting" else f"is disabled: {self.failure}")
            if len(self._calls) >= MAX_CALLS:
                raise self._error("is overloaded")
            self._calls[number] = _Call(kind, what, time.monotonic() + seconds, seconds, future)
            connection = self._connection
        sent = False
        if self._sending.acquire(timeout=SEND_SECONDS):
            try:
                with contextlib.suppress(OSError):
                    connection.sendall(data)
                    sent = True
            finally:
                self._sending.release()
        if not sent:
            self.disable_plugin(f"it does not accept calls ({what})", connection)
        return future

    def call(self, kind: str, arguments: Mapping[str, Any], what: str, seconds: float) -> Any:
        future = self.ask(kind, arguments, what, seconds)
        try:
            return future.result(seconds + SEND_SECONDS)
        except TimeoutError:
            self.disable_plugin(_timeout_message(what, seconds))
            raise self._error(f"was disabled: {self.failure}") from None

    def process_logits(self, name: str, tokens: memoryview, logits: memoryview) -> bytes:
        """Call a logits processor; return the bytes of the changed logits, float32 (V,). Raises PluginError."""
        # tokens: prompt and answer so far, int32 (L,). logits: float32 (V,), where V is the size of the vocabulary.
        if logits.nbytes > wire.ROW_BYTES or tokens.nbytes > wire.SHARED_BYTES - wire.ROW_BYTES:
            raise self._error("cannot process this many tokens")
        what = f"logits processor {name}"
        arguments = {"name": name, "tokens": tokens.nbytes // 4, "vocab": logits.nbytes // 4}
        start = time.monotonic()
        if not self._row_lock.acquire(timeout=ROW_SECONDS):
            raise self._error("is overloaded")
        try:
            if self.state == "on":
                self._memory[: logits.nbytes] = logits
                self._memory[wire.ROW_BYTES : wire.ROW_BYTES + tokens.nbytes] = tokens
            self.call("logits", arguments, what, ROW_SECONDS)
            changed = bytes(self._memory[: logits.nbytes])
        finally:
            self._row_lock.release()
        self._record_wait(what, start, time.monotonic())
        return changed

    def _record_wait(self, what: str, start: float, end: float) -> None:
        self._wait_seconds = max(0.0, self._wait_seconds - ROW_SHARE * (end - self._wait_updated)) + (end - start)
        self._wait_updated = end
        if self._wait_seconds > ROW_ALLOWANCE_SECONDS:
            self.disable_plugin(f"{what} delays all responses")

    def disable_plugin(self, reason: str, source: socket.socket | None = None) -> None:
        """Disable the plugin: kill its processes and make its calls fail. Do nothing if `source` is an earlier
        process's socket."""
        # Without the check of `source`, a thread that notices the failure of an earlier process could kill the new one.
        with self._lock:
            if self.state == "off" or (source is not None and source is not self._connection):
                return
            self.state, self.failure = "off", reason
            calls, process, connection = list(self._calls.values()), self._process, self._connection
            self._calls.clear()
            self.ready.set()  # without the lock, this line could set `ready` after the next start has cleared it
        if reason != SERVER_ENDS:
            _log.warning("the plugin %s was disabled: %s", self.name, reason)
        if process is not None:
            with contextlib.suppress(OSError):
                # The group always includes `process`, because a session leader cannot leave its process group.
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._error(f"was disabled: {reason}"))

    def close(self) -> None:
        with self._lock:
            process, state = self._process, self.state
        if state != "off":
            self.disable_plugin(SERVER_ENDS)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SEND_SECONDS)

    def _error(self, problem: str) -> PluginError:
        return PluginError(f"the plugin {self.name} {problem}", plugin=self.name)

    # The methods below run in the thread that listens to the plugin.

    def _listen(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        reason, output_logger = "its process has ended", _OutputLogger(self)
        unpacker = wire.Unpacker(wire.MAX_ANSWER_BYTES, wire.ANSWER_LIMITS)
        output = cast(IO[bytes], process.stdout)
        readers: selectors.BaseSelector | None = None
        try:
            readers = selectors.DefaultSelector()
            readers.register(connection, selectors.EVENT_READ)
            readers.register(output, selectors.EVENT_READ)
            while True:
                readable = [key.fileobj for key, _ in readers.select(self._seconds_to_deadline())]
                if late := self._find_timed_out_call():
                    reason = late
                    break
                if output in readable:
                    text = os.read(output.fileno(), 1 << 16)
                    if not text:
                        readers.unregister(output)
                    elif not output_logger.log_output(text):
                        reason = "it printed too much"
                        break
                if connection in readable:
                    packets = wire.receive(connection, unpacker)
                    if packets is None:
                        break
                    if failure := next((problem for packet in packets if (problem := self._handle_packet(packet))), ""):
                        reason = failure
                        break
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"it sent an invalid message ({type(error).__name__})"
            if readers is None:
                reason = f"it could not be started: {error}"
        self.disable_plugin(reason, connection)
        if readers is not None:
            readers.close()
        process.wait()
        output_logger.log_rest(output.fileno())
        connection.close()
        output.close()

    def _seconds_to_deadline(self) -> float:
        with self._lock:
            ends = [call.deadline for call in self._calls.values()]
        if self.state == "starting":
            ends.append(self._started + START_SECONDS)
        return max(0.0, min(min(ends, default=1e9) - time.monotonic(), 0.25))

    def _find_timed_out_call(self) -> str:
        now = time.monotonic()
        with self._lock:
            late = next((call for call in self._calls.values() if call.deadline <= now), None)
        if late is not None:
            return _timeout_message(late.what, late.seconds)
        if self.state == "starting" and self._started + START_SECONDS <= now:
            return _timeout_message("loading it", START_SECONDS)
        return ""

    def _handle_packet(self, packet: Any) -> str:
        # Returns the reason to disable the plugin, if any.
        if not isinstance(packet, dict):
            raise ValueError("not a packet")
        if "unloadable" in packet:
            return _one_line(f"it cannot be loaded: {packet['unloadable']}")
        if "offer" in packet:
            offer, left_out = validate_offer(packet["offer"])
            for sentence in left_out:
                _log.warning("the plugin %s: %s", self.name, sentence)
            with self._lock:
                if self.state == "starting":
                    self.offer, self.left_out, self.state = offer, left_out, "on"
                    self.ready.set()
            return ""
        number = packet.get("id")
        if type(number) is not int or len(packet.keys() & {"result", "refused", "failed"}) != 1:
            return "it sent a response without a result"
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                return "it sent a result for a call that was not made"
            if "result" in packet and not is_valid_result(call.kind, packet["result"]):
                return _one_line(f"{call.what} returned a result of the wrong type")
            # From here on, `disable_plugin` no longer makes this call fail, so the code below must complete the future
            # and must not raise any exception before that.
            del self._calls[number]
        if not call.future.set_running_or_notify_cancel():
            return _failure_reason(packet, call)
        if "refused" in packet:
            call.future.set_exception(PluginRefusalError(_one_line(str(packet["refused"])), plugin=self.name))
        elif "failed" in packet:
            reason = f"failed in {call.what}: {_one_line(str(packet['failed']))}"
            call.future.set_exception(self._error(reason))
        else:
            call.future.set_result(packet["result"])
        return _failure_reason(packet, call)


class _OutputLogger:
    def __init__(self, process: PluginProcess) -> None:
        self._process = process
        self._bytes = 0
        self._partial_line = b""

    def log_output(self, text: bytes) -> bool:
        self._bytes += len(text)
        *lines, rest = (self._partial_line + text).split(b"\n")
        self._partial_line = rest[-4096:]
        for line in lines:
            self._process.printed_lines += 1
            if self._process.printed_lines <= MAX_PRINTED_LINES:
                _log.warning(
                    "the plugin %s printed: %s", self._process.name, _one_line(line.decode("utf-8", "replace"))
                )
        return self._bytes <= MAX_PRINTED_BYTES

    def log_rest(self, output: int) -> None:
        # The remaining output often contains the reason why the process ended. Its last line may lack a newline.
        os.set_blocking(output, False)  # do not wait for processes of the plugin that have the pipe open
        with contextlib.suppress(OSError):
            while (text := os.read(output, 1 << 16)) and self.log_output(text):
                pass
        if self._partial_line:
            self.log_output(b"\n")


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    with process:  # on exit, the context manager closes the output and waits for the process
        process.kill()


def _failure_reason(packet: Mapping[str, Any], call: _Call) -> str:
    return _one_line(f"{call.what} raised {packet['failed']}") if "failed" in packet else ""


def _timeout_message(what: str, seconds: float) -> str:
    return f"{what} took longer than {seconds:g} s"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:300].strip()


def entry_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(row["name"]) for row in rows]


class Plugins:
    """The enabled plugins. Raises PluginError for names that are invalid, repeated or not installed."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        installed = {each.name for each in list_installed()} if names else set()
        for name in names:
            if name not in installed:
                available = ", ".join(sorted(installed)) or "none"
                raise PluginError(f"no plugin {name!r} is installed; installed: {available}", plugin=name)
            if not NAME.fullmatch(name):
                raise PluginError(f"the plugin {name!r} cannot be enabled: its name {NAME_RULE}", plugin=name)
            if names.count(name) > 1:
                raise PluginError(f"the plugin {name} is specified more than once", plugin=name)
        self.processes = tuple(PluginProcess(name) for name in names)

    def start(self) -> None:
        for process in self.processes:
            process.start()

    def wait(self) -> None:
        for process in self.processes:
            process.ready.wait(START_SECONDS)

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def find(self, name: str) -> PluginProcess | None:
        return next((process for process in self.processes if process.name == name), None)

    def entries(self, kind: str) -> Iterator[tuple[PluginProcess, dict[str, Any]]]:
        """Yield (process, entry) for each entry of a kind. Skip entries that repeat a name, unless they are pages."""
        seen = set()
        for process in self.processes:
            for row in process.offer.get(kind, []) if process.state == "on" else []:
                name = row.get("name")
                if kind == "pages" or name not in seen:
                    seen.add(name)
                    yield process, row

    def logits_processor(self, name: str) -> RowFunction | None:
        for process, row in self.entries("logits_processors"):
            if row["name"] == name:
                return lambda tokens, logits: process.process_logits(name, tokens, logits)
        return None
