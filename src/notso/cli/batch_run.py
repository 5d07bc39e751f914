"""Run a batch: keep the engine busy, and append answers to the output file as they are completed.

Each output line is synced to disk before the next one is written. If a crash truncates the last line, the next run
removes it. Answered requests are recognized by their id, a hash of the input line.

If the engine fails, it is loaded again, and the requests that it was answering run one at a time. A request that
makes it fail again gets an error; the others are answered.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import queue
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import typer

from notso.cli import terminal
from notso.cli.terminal import Interruption
from notso.system.files import lock, sync
from notso.text_file import NotTextError, utf8_stream

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.output.generation import Generation
    from notso.smollm3.values.model_info import ModelInfo
    from notso.web.api.chat_completions.fields import ChatRequest
    from notso.web.api.shared.completion import Completion
    from notso.web.edge.errors import ApiError

# OUT may be the wrong file, so at most this much of a line is read before its beginning is checked.
MAX_BYTES_AT_ONCE = 64 << 20
_ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class RequestLine:
    number: int
    id: str
    content: bytes | None  # None if the line is longer than MAX_LINE_BYTES
    custom_id: str | None
    repeats: bool  # whether an earlier line has the same custom_id


class BatchInput:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids = {line.id for line in self.lines()}

    def lines(self) -> Iterator[RequestLine]:
        seen: set[bytes] = set()
        with self.path.open("rb") as file:
            for number, content in enumerate(self._line_contents(file), start=1):
                if content is not None:
                    content = content.strip()
                    if not content:
                        continue
                custom_id = _custom_id(content)
                custom_id_hash = hashlib.sha256((custom_id or "").encode("utf-8", "surrogatepass")).digest()
                repeats = custom_id is not None and custom_id_hash in seen
                seen.add(custom_id_hash)
                # If there is no unique custom_id, the line number distinguishes identical requests.
                prefix = b"line %d\0" % number if custom_id is None or repeats else b""
                key = hashlib.sha256(prefix + (content or b"")).hexdigest()[:_ID_DIGITS]
                yield RequestLine(number, f"batch_req_{key}", content, custom_id, repeats)

    def _line_contents(self, file: BinaryIO) -> Iterator[bytes | None]:
        try:
            yield from _read_lines(file)
        except NotTextError as error:
            raise typer.BadParameter(f"{self.path} {error}", param_hint="IN") from None


class BatchOutput:
    def __init__(self, path: Path, request_ids: set[str]) -> None:
        """Open or create the file. Raises typer.BadParameter."""
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise _output_error(f"{path} must be a regular file: existing answers are read to resume a batch")
        self.path = path
        self.failed = 0  # number of answers in the file that are errors
        self._file: BinaryIO = path.open("a+b")
        try:
            lock(self._file.fileno())
            # If a line does not answer a request of this batch, the file is rejected and left unchanged.
            self.done = self._read_answers(request_ids)
        except BlockingIOError:
            self._file.close()
            raise _output_error(f"another process is writing to {path}") from None
        except BaseException:
            self._file.close()
            raise

    def write(self, answer: dict[str, Any]) -> None:
        """Append one answer and sync it to disk."""
        # UTF-8 cannot encode a lone surrogate in a custom_id. `backslashreplace` writes it as \ud800, a JSON escape.
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._file.write(line)
        self._file.flush()
        sync(self._file.fileno())
        self.done.add(answer["id"])
        self.failed += answer.get("error") is not None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_answers(self, request_ids: set[str]) -> set[str]:
        self._file.seek(0)
        done: set[str] = set()
        end = 0
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_BYTES_AT_ONCE), b""), start=1):
            if not line.endswith(b"\n") and _may_be_partial_answer(line, request_ids):
                line += self._file.readline()  # with log probabilities, an answer can take hundreds of megabytes
                if not line.endswith(b"\n"):  # truncated by a crash
                    break
            answer = _json_object(line)
            answer_id = str(answer.get("id", ""))
            if answer_id not in request_ids:
                raise _output_error(
                    f"line {number} of {self.path} does not match a request of this batch, or the request has changed; "
                    "use another output file"
                )
            done.add(answer_id)
            self.failed += answer.get("error") is not None
            end += len(line)
        if end < self._file.seek(0, os.SEEK_END):
            self._file.truncate(end)
        return done


def _read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    from notso.web.api.shared.batch_line import MAX_LINE_BYTES

    file = utf8_stream(file)  # some editors write UTF-16 or a byte order mark
    # For a line that is too long, yield None without reading the whole line into memory.
    while piece := file.readline(MAX_LINE_BYTES + 1):
        if len(piece) <= MAX_LINE_BYTES or piece.endswith(b"\n"):
            yield piece.rstrip(b"\r\n")
            continue
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_BYTES)
        yield None


def _custom_id(content: bytes | None) -> str | None:
    custom_id = _json_object(content or b"").get("custom_id")
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _json_object(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


def _may_be_partial_answer(line: bytes, request_ids: set[str]) -> bool:
    # `id` is the first field of an answer, so a truncated line begins with an id, which may itself be truncated.
    beginnings = (json.dumps({"id": id}).encode()[:-1] for id in request_ids)
    return any(line.startswith(beginning) or beginning.startswith(line) for beginning in beginnings)


_output_error = partial(typer.BadParameter, param_hint="OUT")

URL = "/v1/chat/completions"
_POLL_SECONDS = 0.2  # interval for checking whether Ctrl-C was pressed
# If the engine fails twice on each of this many lines, and completes no answer in between, the engine is assumed to be
# at fault, not the lines.
_MAX_FAILURES = 8
_REQUESTS_PER_SLOT = 2  # submitted requests per concurrent sequence of the engine; above 1, to keep the engine busy


class RequestSource(Protocol):
    ids: set[str]

    def lines(self) -> Iterable[RequestLine]: ...


class AnswerSink(Protocol):
    done: set[str]  # ids of answered requests

    def write(self, answer: dict[str, Any]) -> None: ...


class BatchEngine:
    # The engine of a batch. After `close`, `get` loads it again.
    def __init__(self, engine: Engine, load: Callable[[], Engine]) -> None:
        self._engine: Engine | None = engine
        self._load = load

    def get(self) -> Engine:
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    def close(self) -> None:
        from notso.smollm3 import release_freed_memory

        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # free memory now, because the next load measures the available memory
            release_freed_memory()


class _RunningRequest:
    def __init__(self, line: RequestLine, request: ChatRequest, info: ModelInfo) -> None:
        self.line = line
        self.request = request
        self.info = info
        self.generations: list[Generation] = []

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def stop(self) -> None:
        for generation in self.generations:
            generation.stop()


class BatchRun:
    def __init__(
        self,
        engine: BatchEngine,
        source: RequestSource,
        sink: AnswerSink,
        interruption: Interruption,
        report: terminal.Progress,
    ) -> None:
        self.answered = 0
        self.failed = 0
        self._engine = engine
        self._source = source
        self._sink = sink
        self._interruption = interruption
        self._report = report
        self._running: dict[_RunningRequest, None] = {}  # in submission order
        self._finished_signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Lines on which the engine failed twice. Their errors are written when another line has been answered, or when
        # no lines are left. Until then, it is not known whether the lines or the engine caused the failures.
        self._blamed: list[RequestLine] = []

    def answer_all(self) -> None:
        """Answer all lines, or return after Ctrl-C. Raises EngineError if the engine keeps failing."""
        self._report_progress()
        max_running = _REQUESTS_PER_SLOT * max(1, self._engine.get().info.max_num_seqs)
        try:
            for line in self._unanswered():
                while len(self._running) >= max_running and not self._interruption.requested():
                    self._recover(self._write_finished())
                if self._interruption.requested():
                    return
                self._recover(self._submit(line))
            while self._running and not self._interruption.requested():
                self._recover(self._write_finished())
            if not self._interruption.requested():
                self._write_blamed()
        finally:
            for entry in self._running:
                entry.stop()

    def _unanswered(self) -> Iterator[RequestLine]:
        return (line for line in self._source.lines() if line.id not in self._sink.done)

    def _submit(self, line: RequestLine) -> list[RequestLine]:
        # Returns a list with the line if the engine has failed, else an empty list.
        from notso.smollm3.errors import NotsoError
        from notso.web.edge.errors import ApiError, api_error_of

        engine, entry = self._engine.get(), None
        try:
            entry = _RunningRequest(line, read_request(line), engine.info)
            request = entry.request
            request.check_prompt(0, lambda _: engine.count_tokens(request.messages, request.options))
            owner = line.id if request.fresh else ""
            options = replace(request.options, owner=owner, priority="background")
            for prompt, params in request.choices:
                entry.generations.append(engine.submit(prompt, params, options))
        except (ApiError, NotsoError) as error:
            if entry is not None:
                entry.stop()  # stop the choices that were submitted before the rejected one
            if _is_engine_failure(error):
                return [line]
            self._write(line, _error_response(line, api_error_of(error)))
            return []
        self._running[entry] = None
        for generation in entry.generations:
            generation.subscribe(lambda: self._finished_signals.put(None) if entry.finished else None)
        return []

    def _write_finished(self) -> list[RequestLine]:
        with contextlib.suppress(queue.Empty):
            self._finished_signals.get(timeout=_POLL_SECONDS)
        return self._write_answers([entry for entry in self._running if entry.finished])

    def _write_answers(self, entries: list[_RunningRequest]) -> list[RequestLine]:
        # Returns the lines that an engine failure left unanswered.
        failed = []
        for entry in entries:
            if self._interruption.requested():
                break  # do not write answers that Ctrl-C has cut off
            del self._running[entry]
            answer = self._collect_answer(entry)
            if answer is None:
                failed.append(entry.line)
            else:
                self._write(entry.line, answer)
        return failed

    def _recover(self, failed: list[RequestLine]) -> None:
        from notso.smollm3.errors import EngineError

        if not failed:
            return
        self._engine.close()
        # Any of the running requests may have caused the failure, so each is run again on its own.
        for line in [*failed, *self._write_answers(list(self._running))]:
            if self._interruption.requested():
                return
            failed_again = self._submit(line)
            while self._running and not self._interruption.requested():
                failed_again += self._write_finished()
            if failed_again:
                self._engine.close()
                self._blamed.append(line)
                if len(self._blamed) == _MAX_FAILURES:
                    raise EngineError(ENGINE_FAILED)

    def _collect_answer(self, entry: _RunningRequest) -> dict[str, Any] | None:
        # Returns None if the engine failed before the answer was complete.
        from notso.smollm3.errors import NotsoError
        from notso.web.api.shared.api_request import ignored_headers
        from notso.web.api.shared.completion import Completion, collect_choice, fingerprint
        from notso.web.edge.errors import api_error_of
        from notso.web.engine.model_names import model_id

        try:
            request = entry.request
            options = {"raw_thinking": request.raw_thinking, "hides_reasoning": request.hides_reasoning}
            options["logprobs"] = request.options.top_logprobs is not None
            choices = [collect_choice(generation.read(0), **options) for generation in entry.generations]
        except NotsoError as error:
            entry.stop()  # if one choice fails, the whole request fails
            return None if _is_engine_failure(error) else _error_response(entry.line, api_error_of(error))
        ends = [event.finish_reason for each in entry.generations for event in each.read(0) if event.kind == "end"]
        if len(ends) < len(entry.generations) or "cancelled" in ends:
            return None  # the engine stopped before it completed the answer
        completion: Completion = Completion(model_id(entry.info), fingerprint(entry.info))
        answer = _response(entry.line, 200, completion.body(choices, entry.request.reasoning_mode)) | {"error": None}
        if ignored := ignored_headers(entry.request):
            answer["response"]["headers"] = ignored
        return answer

    def _write(self, line: RequestLine, answer: dict[str, Any]) -> None:
        self._sink.write(answer)
        if answer["error"] is None:
            self.answered += 1
            self._write_blamed()
        else:
            self.failed += 1
        self._report_progress()

    def _write_blamed(self) -> None:
        from notso.smollm3.errors import EngineError
        from notso.web.edge.errors import api_error_of

        blamed, self._blamed = self._blamed, []
        for line in blamed:
            self._write(line, _error_response(line, api_error_of(EngineError(BLAMED))))

    def _report_progress(self) -> None:
        self._report("answering", len(self._sink.done), len(self._source.ids))


ENGINE_FAILED = "the engine failed; run the same command again to continue"
BLAMED = "the engine failed twice while it was answering this request"


def _is_engine_failure(error: Exception) -> bool:
    # The line may not be the cause of an engine failure. If an error were written for the line, the next run would skip
    # the line.
    from notso.smollm3.engine.engine_core import CLOSED, FAILED
    from notso.smollm3.errors import EngineLostError

    return isinstance(error, EngineLostError) or str(error) in (CLOSED, FAILED)


def read_request(line: RequestLine) -> ChatRequest:
    """Parse and validate a line. Raises ApiError."""
    from notso.web.api.chat_completions.fields import parse_chat_request
    from notso.web.api.shared.batch_line import line_too_long, read_line
    from notso.web.edge.errors import ApiError

    if line.content is None:
        raise line_too_long()
    entry = read_line(line.content, (URL,))
    if line.repeats:
        raise ApiError(400, "invalid_value", "custom_id is already used by an earlier line", param="custom_id")
    request = parse_chat_request(entry.body)
    return replace(request, ignored=(*request.ignored, *entry.ignored))


def _error_response(line: RequestLine, error: ApiError) -> dict[str, Any]:
    report = {"code": error.code, "message": error.message}
    return _response(line, error.status, error.body) | {"error": report}


def _response(line: RequestLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    request_id = line.id.replace("batch_req", "req")
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
    }
