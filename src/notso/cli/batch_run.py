"""Run a batch: keep the engine's slots full and write answers as they finish."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from notso.cli import terminal
from notso.cli.batch_files import RequestLine
from notso.cli.terminal import Interruption

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.output.generation import Generation
    from notso.web.api.chat_completions.fields import ChatRequest
    from notso.web.api.shared.completion import Completion
    from notso.web.edge.api_error import ApiError

URL = "/v1/chat/completions"
_LOOK_SECONDS = 0.2  # poll interval for Ctrl-C
_AHEAD = 2  # requests submitted per engine slot, so that the engine never idles


class Lines(Protocol):
    """Source of request lines."""

    ids: set[str]

    def lines(self) -> Iterable[RequestLine]: ...


class Answers(Protocol):
    """Sink for answers; `done` holds answered ids."""

    done: set[str]

    def write(self, answer: dict[str, Any]) -> None: ...


class _Asked:
    def __init__(self, line: RequestLine, request: ChatRequest) -> None:
        self.line = line
        self.request = request
        # One per choice.
        self.generations: list[Generation] = []

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def stop(self) -> None:
        for generation in self.generations:
            generation.stop()


class BatchRun:
    """One pass over the input."""

    def __init__(
        self,
        engine: Engine,
        source: Lines,
        sink: Answers,
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
        self._under_way: dict[_Asked, None] = {}  # in submission order
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def answer_all(self) -> None:
        """Run until every line has an answer, or Ctrl-C."""
        self._tell()
        most = _AHEAD * max(1, self._engine.info.max_num_seqs)
        try:
            for line in self._missing():
                while len(self._under_way) >= most and not self._interruption.requested():
                    self._finalise()
                if self._interruption.requested():
                    return
                self._ask(line)
            while self._under_way and not self._interruption.requested():
                self._finalise()
        finally:
            for asked in self._under_way:
                asked.stop()

    def _missing(self) -> Iterator[RequestLine]:
        return (line for line in self._source.lines() if line.id not in self._sink.done)

    def _ask(self, line: RequestLine) -> None:
        from notso.smollm3.errors import NotsoError
        from notso.web.edge.api_error import ApiError, api_error_of

        asked = None
        try:
            asked = _Asked(line, read_request(line))
            request = asked.request
            owner = line.id if request.fresh else ""
            options = replace(request.options, owner=owner, priority="background")
            for prompt, params in request.choices:
                asked.generations.append(self._engine.submit(prompt, params, options))
        except (ApiError, NotsoError) as error:
            if asked is not None:
                asked.stop()  # choices submitted before one was rejected
            self._write(line, _failure(line, api_error_of(error)))
            return
        self._under_way[asked] = None
        for generation in asked.generations:
            generation.subscribe(lambda: self._news.put(None) if asked.finished else None)

    def _finalise(self) -> None:
        # A short wait, to notice Ctrl-C.
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=_LOOK_SECONDS)
        ended = [asked for asked in self._under_way if asked.finished]
        for asked in ended:
            if self._interruption.requested():
                return  # stopped answers are incomplete
            del self._under_way[asked]
            self._write(asked.line, self._answer(asked))

    def _answer(self, asked: _Asked) -> dict[str, Any]:
        from notso.smollm3.errors import NotsoError
        from notso.web.api.shared.api_request import ignored_headers
        from notso.web.api.shared.completion import Completion, collect, fingerprint
        from notso.web.edge.api_error import api_error_of
        from notso.web.engine.model_names import model_id

        info = self._engine.info
        try:
            raw, weighed = asked.request.raw_thinking, asked.request.options.top_logprobs is not None
            choices = [
                collect(generation.read(0), raw_thinking=raw, logprobs=weighed) for generation in asked.generations
            ]
        except NotsoError as error:
            asked.stop()  # the other choices are useless
            return _failure(asked.line, api_error_of(error))
        completion: Completion = Completion(model_id(info), fingerprint(info))
        answer = _response(asked.line, 200, completion.body(choices, asked.request.reasoning_mode)) | {"error": None}
        if ignored := ignored_headers(asked.request):
            answer["response"]["headers"] = ignored
        return answer

    def _write(self, line: RequestLine, answer: dict[str, Any]) -> None:
        self._sink.write(answer)
        if answer["error"] is None:
            self.answered += 1
        else:
            self.failed += 1
        self._tell()

    def _tell(self) -> None:
        self._report("answering", len(self._sink.done), len(self._source.ids))


def read_request(line: RequestLine) -> ChatRequest:
    """Parse and validate a line. Raises ApiError."""
    from notso.web.api.chat_completions.fields import parse_chat_request
    from notso.web.api.shared.batch_line import line_too_long, read_line
    from notso.web.edge.api_error import ApiError

    if line.content is None:
        raise line_too_long()
    entry = read_line(line.content, (URL,))
    if line.repeats:
        raise ApiError(400, "invalid_value", "custom_id is already used by an earlier line", param="custom_id")
    request = parse_chat_request(entry.body)
    return replace(request, ignored=(*request.ignored, *entry.ignored))


def _failure(line: RequestLine, error: ApiError) -> dict[str, Any]:
    report = {"code": error.code, "message": error.message}
    return _response(line, error.status, error.body) | {"error": report}


def _response(line: RequestLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    request_id = line.id.replace("batch_req", "req")
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
    }
