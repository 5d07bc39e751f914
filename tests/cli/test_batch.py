"""`notso batch` answers every request exactly once, even with errors and interruptions."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from notso.cli import batch, batch_run, cluster, engines
from notso.cli.exit_codes import NO_ROOM
from notso.qtensor.errors import DeviceLostError, NotsoError
from notso.smollm3.engine import engine as engine_module
from notso.smollm3.engine.engine_core import CLOSED, FAILED
from notso.smollm3.errors import ContextLengthError, EngineError, EngineLostError, OutOfMemoryError
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.output.generation import Generation
from notso.smollm3.values.events import Event, Usage
from notso.smollm3.values.messages import Message
from notso.smollm3.values.model_info import ModelInfo
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams
from notso.web.api.shared.batch_line import MAX_LINE_BYTES

Run = Callable[..., Any]


class ManyAnswers:
    """Engine that answers each question with its own text, last question first, in a separate thread.

    `refuses` maps a question to an error that `submit` raises, and `fails` to one that is an event of the answer. With
    `running_also_fail`, the answers to all waiting questions get that event, too. At most `most` answers are given, and
    none while fewer than `awaits` questions wait and fewer than `in_all` have arrived.
    """

    def __init__(self, *, slots: int = 4, most: int = 1 << 30) -> None:
        self.info = ModelInfo("Many Answers", "", False, 8, 8, 4096, max_num_seqs=slots)
        self.most = most
        self.awaits = self.in_all = 0
        self.refuses: dict[str, NotsoError] = {}
        self.fails: dict[str, NotsoError] = {}
        self.asked: list[tuple[str, SamplingParams, RequestOptions]] = []
        self.most_at_once = 0
        self.opened = 0
        self.running_also_fail = False
        self._waiting: list[tuple[str, SamplingParams, Generation]] = []
        self._lock = threading.Lock()

    def open(self, *_: object, **__: object) -> ManyAnswers:
        self.opened += 1
        self._waiting.clear()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def submit(self, messages: Sequence[Message], params: SamplingParams, options: RequestOptions) -> Generation:
        question = messages[-1].content
        if question in self.refuses:
            raise self.refuses[question]
        generation = Generation()
        with self._lock:
            self.asked.append((question, params, options))
            self._waiting.append((question, params, generation))
            self.most_at_once = max(self.most_at_once, len(self._waiting))
        return generation

    def close(self) -> None:
        self._closed.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._closed.wait(0.002):
            with self._lock:
                is_early = len(self._waiting) < self.awaits and len(self.asked) < self.in_all
                if not self._waiting or not self.most or is_early:
                    continue
                question, params, generation = self._waiting.pop()  # last question first, to test any order
                self.most -= 1
            if question in self.fails:
                with self._lock:
                    failed = [generation, *(each for _, _, each in self._waiting if self.running_also_fail)]
                    del self._waiting[: len(failed) - 1]
                for each in failed:
                    each.write([Event("error", error=self.fails[question])], last=True)
                continue
            seed = f" {params.seed}" if params.seed is not None else ""
            events = [Event("reasoning", text="Hm."), Event("text", text=f"You said {question}{seed}")]
            events += [Event("usage", usage=Usage(7, 5, 2, 3, 10.0, 50.0)), Event("end", finish_reason="stop")]
            generation.write(events[:1])
            generation.write(events[1:], last=True)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> ManyAnswers:
    engine = ManyAnswers()
    monkeypatch.setattr(engines, "open_engine", engine.open)
    return engine


def entry(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "any", "messages": messages} | body,
    }


def write(path: Path, entries: Sequence[Any]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in entries))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines by custom_id; every line must be complete and answer a different request."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_every_request_is_answered_once(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [entry(number) for number in range(20)])
    result = notso("batch", str(source), str(tmp_path / "out.jsonl"))

    assert (result.code, result.out) == (0, "")
    assert "20 requests: 20 answered, 0 failed." in result.err
    found = answers(tmp_path / "out.jsonl")
    assert set(found) == {f"request-{number}" for number in range(20)}
    line = found["request-7"]
    assert line["error"] is None and line["id"].startswith("batch_req_")
    assert line["response"]["status_code"] == 200 and line["response"]["request_id"].startswith("req_")
    body = line["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "many-answers" and body["created"] > 1.7e9
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "You said question 7",
                "refusal": None,
                "reasoning_content": "Hm.",
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_batch_limits_requests_in_flight_and_uses_background_priority(
    many: ManyAnswers, notso: Run, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [entry(number) for number in range(40)])
    many.awaits, many.in_all = 4, 40
    assert notso("batch", str(source), str(tmp_path / "out.jsonl")).code == 0
    assert 4 <= many.most_at_once <= 8, "one request per slot, and at most as many queued"
    assert {options.priority for _, _, options in many.asked} == {"background"}


def test_request_fields_reach_the_engine(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    asked = entry(1, temperature=0, max_completion_tokens=9, stop="x", seed=5, n=3, reasoning_effort="low")
    notso("batch", str(write(tmp_path / "in.jsonl", [asked])), str(tmp_path / "out.jsonl"))
    _, params, options = many.asked[0]
    assert (params.temperature, params.max_tokens, params.stop, params.thinking_budget) == (0, 9, ("x",), 256)
    assert options.thinking is True and options.tools is None
    body = answers(tmp_path / "out.jsonl")["request-1"]["response"]["body"]
    said = [choice["message"]["content"] for choice in body["choices"]]
    assert said == ["You said question 1 5", "You said question 1 6", "You said question 1 7"]
    assert body["usage"]["prompt_tokens"] == 7 and body["usage"]["completion_tokens"] == 15


REFUSED = [
    (entry(1, mirostat=2), 400, "unsupported_parameter", "mirostat"),
    (entry(1, temperature=7), 400, "invalid_value", "temperature"),
    (entry(1, stream=True), 400, "unsupported_parameter", "stream"),
    (entry(1) | {"url": "/v1/embeddings"}, 400, "not_supported", "url"),
    (entry(1) | {"method": "GET"}, 400, "invalid_value", "method"),
    (entry(1) | {"custom_id": 5}, 400, "invalid_value", "custom_id"),
    (entry(1) | {"body": []}, 400, "invalid_value", "body"),
    ("not JSON", 400, "invalid_json", None),
    ('{"custom_id": "a", "custom_id": "b"}', 400, "invalid_json", None),
    ("[" * 100_000, 400, "invalid_json", None),
    ('{"custom_id": "x", "body": {"messages": [], "temperature": NaN}}', 400, "invalid_json", None),
    (r'{"custom_id": "\ud83d", "method": "POST"}', 400, "invalid_text", None),
    ("x" * MAX_LINE_BYTES + "y", 413, "request_too_large", None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "status", "code", "param"), REFUSED, ids=lambda value: str(value)[:30])
def test_invalid_line_gets_an_error_and_other_lines_are_answered(
    many: ManyAnswers, notso: Run, tmp_path: Path, line: Any, status: int, code: str, param: str | None
) -> None:
    source = write(tmp_path / "in.jsonl", [entry(0), line, "", entry(2)])
    result = notso("batch", str(source), str(tmp_path / "out.jsonl"))
    assert result.code == 9 and "3 requests: 2 answered, 1 failed." in result.err
    lines = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    (bad,) = [each for each in lines if each["error"] is not None]
    assert bad["response"]["status_code"] == status
    error = bad["response"]["body"]["error"]
    assert (error["code"], error["param"]) == (code, param) and bad["error"]["message"] == error["message"]
    assert error["type"] == "invalid_request_error"
    if param:
        assert param in error["message"]


def test_ignored_fields_are_listed_in_response_headers(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    lines = [entry(number) for number in range(2)]
    lines[0]["body"] |= {"verbosity": "low", "frequency": 1}
    lines[0]["priority"] = 1
    source = write(tmp_path / "in.jsonl", lines)
    assert notso("batch", str(source), str(tmp_path / "out.jsonl")).code == 0
    found = answers(tmp_path / "out.jsonl")
    assert found["request-0"]["response"]["headers"] == {"x-notso-ignored": "priority, verbosity, frequency"}
    assert "headers" not in found["request-1"]["response"]


def test_engine_errors_become_error_responses(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    many.refuses["question 1"] = ContextLengthError(9120, 8192)
    many.fails["question 2"] = EngineError("a logit was not finite")
    source = write(tmp_path / "in.jsonl", [entry(number) for number in range(4)])
    assert notso("batch", str(source), str(tmp_path / "out.jsonl")).code == 9
    found = answers(tmp_path / "out.jsonl")
    too_long, failed = found["request-1"]["response"], found["request-2"]["response"]
    assert too_long["status_code"] == 400 and too_long["body"]["error"]["code"] == "context_length_exceeded"
    assert "9,120" in too_long["body"]["error"]["message"] and "8,192" in too_long["body"]["error"]["message"]
    assert failed["status_code"] == 500 and failed["body"]["error"]["code"] == "engine_error"
    assert found["request-0"]["error"] is None and found["request-3"]["error"] is None


FAILURES = [EngineLostError("the GPU failed"), EngineError(CLOSED), EngineError(FAILED)]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("options", [(), ("--ray",)])
def test_only_requests_that_make_the_engine_fail_get_errors(
    many: ManyAnswers,
    ray_models: list[Path | None],
    notso: Run,
    tmp_path: Path,
    failure: NotsoError,
    options: tuple[str, ...],
) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(80)]), tmp_path / "out.jsonl"
    bad = {1, 3, 38, 39, 40, 41, 79}
    many.fails = {f"question {number}": failure for number in bad}
    many.refuses = {f"question {number}": failure for number in (40, 41)}
    many.running_also_fail = True

    assert notso("batch", *options, str(source), str(out)).code == 9

    found = answers(out)
    assert len(found) == 80
    assert {f"request-{number}" for number in bad} == {key for key, line in found.items() if line["error"] is not None}
    error = found["request-3"]["error"]
    assert error == {"code": "engine_error", "message": "the engine failed twice while it was answering this request"}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("options", [(), ("--ray",)])
def test_engine_that_always_fails_leaves_lines_for_the_next_run(
    many: ManyAnswers,
    ray_models: list[Path | None],
    notso: Run,
    tmp_path: Path,
    failure: NotsoError,
    options: tuple[str, ...],
) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(20)]), tmp_path / "out.jsonl"
    many.fails = {f"question {number}": failure for number in range(20)}
    result = notso("batch", *options, str(source), str(out))
    assert result.code == 1 and "run the same command again to continue" in result.err
    assert not out.read_bytes() and many.opened == 9
    many.fails = {}
    assert notso("batch", *options, str(source), str(out)).code == 0
    assert len(answers(out)) == 20 and all(line["error"] is None for line in answers(out).values())


@pytest.mark.parametrize("options", [(), ("--ray",)])
def test_engine_that_cannot_be_loaded_again_leaves_lines(
    many: ManyAnswers,
    ray_models: list[Path | None],
    notso: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    def open_once(*_: object, **__: object) -> ManyAnswers:
        if many.opened:
            raise OutOfMemoryError("no memory is left", needed_bytes=2, available_bytes=1)
        return many.open()

    monkeypatch.setattr(engines, "open_engine", open_once)
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(20)]), tmp_path / "out.jsonl"
    many.awaits, many.in_all = 8, 20
    many.fails = {"question 5": EngineLostError("the GPU failed")}
    result = notso("batch", *options, str(source), str(out))
    assert result.code == (1 if options else NO_ROOM) and "no memory is left" in result.err
    assert 0 < len(answers(out)) < 20 and all(line["error"] is None for line in answers(out).values())


def test_ray_batch_stops_when_all_workers_fail(
    many: ManyAnswers, ray_models: list[Path | None], notso: Run, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(400)]), tmp_path / "out.jsonl"
    many.fails = {f"question {number}": EngineLostError("the GPU failed") for number in range(400)}
    assert notso("batch", "--ray", str(source), str(out)).code == 1
    assert many.opened == 9 and not out.read_bytes()


def test_ray_batch_continues_while_one_worker_fails(
    many: ManyAnswers, ray_models: list[Path | None], notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(requests: list[str], worker: Any, options: dict[str, Any], **_: object) -> Iterator[str]:
        failing = worker(**options, workers=2)
        for each in requests[:-1]:  # one worker fails often during one task of the other
            yield from failing({"request": [each] * 8})["answer"]
        many.fails = {}
        yield from worker(**options, workers=2)({"request": requests[-1:]})["answer"]

    monkeypatch.setitem(sys.modules, "notso.cluster.batch_pool", cast(Any, SimpleNamespace(answers=answer)))
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(7)]), tmp_path / "out.jsonl"
    many.fails = {f"question {number}": EngineLostError("the GPU failed") for number in range(7)}
    result = notso("batch", "--ray", str(source), str(out))
    assert result.code == 1 and "run the same command again" in result.err and list(answers(out)) == ["request-6"]


def test_answer_that_a_closing_engine_cuts_off_is_not_written(
    many: ManyAnswers, notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*arguments: Any) -> Generation:
        monkeypatch.undo()
        monkeypatch.setattr(engines, "open_engine", many.open)
        generation = Generation()
        generation.write([Event("usage", usage=Usage(7, 5, 2, 3, 10.0, 50.0)), Event("end", finish_reason="cancelled")])
        generation.write([], last=True)
        return generation

    monkeypatch.setattr(many, "submit", submit)
    source, out = write(tmp_path / "in.jsonl", [entry(1)]), tmp_path / "out.jsonl"
    assert notso("batch", str(source), str(out)).code == 0 and many.opened == 2
    assert answers(out)["request-1"]["error"] is None


@pytest.mark.parametrize("failure", [DeviceLostError("the GPU is gone"), ValueError("a fault")])
def test_failed_step_of_a_real_engine_costs_no_line(
    notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "reasoning_effort": "none"}
    asked = [entry(number, **fields) for number in range(60)]
    source, out = write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    steps = 0

    def run(runner: ModelRunner, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise failure
        return run_step(runner, *arguments)

    run_step = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", run)
    monkeypatch.setattr(engine_module, "exclude_device", lambda *_: None)
    assert notso("batch", str(source), str(out)).code == 0
    assert len(answers(out)) == 60 and all(line["error"] is None for line in answers(out).values())


def test_rerun_still_exits_with_failure_code(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    many.refuses["question 1"] = ContextLengthError(9120, 8192)
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(2)]), tmp_path / "out.jsonl"

    assert [notso("batch", str(source), str(out)).code for _ in range(2)] == [9, 9]


def test_duplicate_custom_id_is_refused(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [entry(1), entry(1), entry(1)])
    out = tmp_path / "out.jsonl"
    notso("batch", str(source), str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 3
    assert sorted(line["response"]["status_code"] for line in lines) == [200, 400, 400]
    assert "3 already done" in notso("batch", str(source), str(out)).err


def test_existing_answers_are_not_recomputed(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(3)]), tmp_path / "out.jsonl"
    notso("batch", str(source), str(out))
    before = out.read_bytes()
    many.asked.clear()
    write(source, [entry(number) for number in range(5)])

    result = notso("batch", str(source), str(out), "--json")

    assert json.loads(result.out) == {"requests": 5, "there": 3, "answered": 2, "failed": 0, "left": 0}
    assert [json.loads(line)["done"] for line in result.err.splitlines()][-1] == 5
    assert {question for question, _, _ in many.asked} == {"question 3", "question 4"}
    assert out.read_bytes().startswith(before) and len(answers(out)) == 5


def test_long_answers_are_not_recomputed(
    many: ManyAnswers, notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "MAX_BYTES_AT_ONCE", 100)
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(3)]), tmp_path / "out.jsonl"
    notso("batch", str(source), str(out))
    before = out.read_bytes()

    assert "3 already done" in notso("batch", str(source), str(out)).err and out.read_bytes() == before
    out.write_bytes(before[:-2])
    assert "2 already done" in notso("batch", str(source), str(out)).err and len(answers(out)) == 3


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_truncated_last_line_is_recomputed(many: ManyAnswers, notso: Run, tmp_path: Path, cut: int) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(3)]), tmp_path / "out.jsonl"
    notso("batch", str(source), str(out))
    whole = out.read_bytes().splitlines(keepends=True)
    last = whole[-1][:-cut] or whole[-1][:1]
    out.write_bytes(b"".join(whole[:-1]) + last)

    assert notso("batch", str(source), str(out)).code == 0

    assert out.read_bytes().startswith(b"".join(whole[:-1])) and len(answers(out)) == 3


@pytest.mark.parametrize(
    "content",
    [
        "something else\n",
        '{"id": "batch_req_0", "custom_id": "x"}\n',
        "{}\n{",
        "a diary",
        '{"id": "batch_req_0"',
        '{"a":1}',
    ],
)
def test_unrelated_output_file_is_not_overwritten(many: ManyAnswers, notso: Run, tmp_path: Path, content: str) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(1)]), tmp_path / "out.jsonl"
    out.write_text(content)
    result = notso("batch", str(source), str(out))
    assert result.code == 2 and "does not match a request of this batch" in result.err
    assert out.read_text() == content and not many.asked


def test_rerun_with_a_changed_request_is_refused(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(1), entry(2)]), tmp_path / "out.jsonl"
    notso("batch", str(source), str(out))
    before = out.read_bytes()
    write(source, ["", entry(2), json.dumps(entry(1)) + "  \r"])  # the same requests at other positions
    assert notso("batch", str(source), str(out)).code == 0 and out.read_bytes() == before
    write(source, [entry(1), entry(2, max_tokens=3)])
    result = notso("batch", str(source), str(out))
    assert result.code == 2 and "request has changed" in " ".join(result.err.split())
    assert out.read_bytes() == before


def test_byte_order_mark_in_input_is_ignored(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(1), entry(2)]), tmp_path / "out.jsonl"
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    assert notso("batch", str(source), str(out)).code == 0
    assert [answer["error"] for answer in answers(out).values()] == [None, None]


def test_output_must_be_a_regular_file(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source, pipe = write(tmp_path / "in.jsonl", [entry(1)]), tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in ("/dev/null", str(pipe)):
        result = notso("batch", str(source), out)
        assert result.code == 2 and "must be a regular file" in result.err and not many.asked


def test_input_and_output_must_differ(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [entry(1)])
    result = notso("batch", str(source), str(source))
    assert result.code == 2 and "same file" in result.err
    assert notso("batch", str(tmp_path / "missing"), str(tmp_path / "out")).code == 2


def test_input_pipe_and_missing_output_folder_are_refused(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = notso("batch", str(pipe), str(tmp_path / "out.jsonl"))
    assert result.code == 2 and "IN must be a regular file" in result.err
    source = write(tmp_path / "in.jsonl", [entry(1)])
    result = notso("batch", str(source), str(tmp_path / "missing" / "out.jsonl"))
    assert result.code == 1 and len(result.err.splitlines()) == 1 and "No such file" in result.err


def test_output_locked_by_another_process_is_refused(many: ManyAnswers, notso: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(1)]), tmp_path / "out.jsonl"
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = notso("batch", str(source), str(out))
    assert result.code == 2 and "another process is writing" in result.err and not many.asked


def test_empty_batch_does_not_load_the_model(notso: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ["", "  "])
    result = notso("batch", str(source), str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "in.jsonl"))
    assert result.code == 0 and "0 requests." in result.err


@pytest.fixture
def ray_models(many: ManyAnswers, monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """Replace Ray with one worker in this process, and return a list of the models that it opens."""
    opened: list[Path | None] = []

    def answer(requests: list[str], worker: Any, options: dict[str, Any], **_: object) -> Iterator[str]:
        opened.append(options["model"])
        engine = worker(**options, workers=1)
        for at in range(0, len(requests), 20):
            yield from engine({"request": requests[at : at + 20]})["answer"]

    monkeypatch.setattr(batch, "FAILED_PAUSE_SECONDS", 0)
    control = SimpleNamespace(ray_connection=lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "ray_control", lambda: control)
    monkeypatch.setitem(sys.modules, "notso.cluster.batch_pool", cast(Any, SimpleNamespace(answers=answer)))
    return opened


def test_ray_workers_get_model_names_unchanged_and_absolute_paths(
    ray_models: list[Path | None], notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [entry(1)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    for number, name in enumerate(["Q8_0", "owner/repository", "model.gguf"]):
        out = tmp_path / f"{number}.jsonl"
        assert notso("batch", "--ray", "--model", name, str(source), str(out)).code == 0 and len(answers(out)) == 1
    assert ray_models == [Path("Q8_0"), Path("owner/repository"), tmp_path / "model.gguf"]


def test_ray_does_not_accept_fetch(ray_models: list[Path | None], notso: Run, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(1)]), tmp_path / "out.jsonl"
    result = notso("batch", "--ray", "--fetch", str(source), str(out))
    assert result.code == 2 and "--fetch" in result.err and "notso pull" in result.err
    assert not ray_models and not out.exists()


PART = """
import sys
sys.path.insert(0, {folder!r})
from test_batch import ManyAnswers
from notso.cli import engines
engines.open_engine = ManyAnswers(most={most}).open
"""


def start(process: Callable[..., Any], source: Path, out: Path, done: int) -> Any:
    """Start a batch in a separate process whose engine gives few answers; return once `done` answers are written."""
    setup = PART.format(folder=str(Path(__file__).parent), most=done + 3)
    running = process("batch", str(source), str(out), setup=setup)
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < done:
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
        time.sleep(0.005)
    return running


def test_killed_batch_resumes_without_loss_or_repetition(
    process: Callable[..., Any], many: ManyAnswers, notso: Run, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(100)]), tmp_path / "out.jsonl"
    kept: list[bytes] = []
    for wanted in (4, 9):
        running = start(process, source, out, wanted)
        running.kill()
        running.communicate()
        assert running.returncode == -signal.SIGKILL
        lines = out.read_bytes().splitlines(keepends=True)
        assert lines[: len(kept)] == kept, "completed lines do not change"
        kept = [line for line in lines if line.endswith(b"\n")]
        assert wanted <= len(kept) < 100

    result = notso("batch", str(source), str(out))

    assert result.code == 0 and f"{len(kept)} already done" in result.err
    assert out.read_bytes().splitlines(keepends=True)[: len(kept)] == kept
    found = answers(out)
    assert set(found) == {f"request-{number}" for number in range(100)}
    assert all(line["response"]["status_code"] == 200 for line in found.values())


def test_ctrl_c_prints_how_to_continue(process: Callable[..., Any], tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [entry(number) for number in range(200)]), tmp_path / "out.jsonl"
    running = start(process, source, out, 2)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130 and b"Run the same command again to continue" in err
    assert out.read_bytes().endswith(b"\n") and 2 <= len(answers(out)) < 200


def test_batched_and_single_requests_get_equal_answers(notso: Run, tmp_path: Path) -> None:
    fields = {"temperature": 0, "max_tokens": 40}
    asked = [
        entry(number, messages=[{"role": "user", "content": f"What is {number} + 4?"}], **fields)
        for number in range(1, 13)
    ]
    out, alone = tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert notso("batch", str(write(tmp_path / "in.jsonl", asked)), str(out)).code == 0
    assert notso("batch", str(write(tmp_path / "one.jsonl", asked[4:5])), str(alone)).code == 0
    together, single = (answers(path)["request-5"]["response"]["body"]["choices"] for path in (out, alone))
    assert together == single
    assert len(answers(out)) == 12 and all(line["error"] is None for line in answers(out).values())
