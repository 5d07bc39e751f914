"""`notso batch`: answer a file of requests, on this machine or on a Ray cluster."""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from notso.cli import cluster, engines, exit_codes, options, terminal
from notso.cli.batch_run import ENGINE_FAILED, BatchEngine, BatchInput, BatchOutput, BatchRun, RequestLine
from notso.cli.terminal import Interruption

EXAMPLES = """\
  notso batch questions.jsonl answers.jsonl
  notso batch --model SmolLM3-Q4_K_M.gguf --json in.jsonl out.jsonl"""


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN", exists=True, dir_okay=False, help="Input file of requests, one JSON object per line."
        ),
    ],
    answers: Annotated[
        Path,
        typer.Argument(metavar="OUT", dir_okay=False, help="Output file; answers are written as they are completed."),
    ],
    model: options.Model = None,
    fetch: options.Fetch = False,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress as JSON lines on stderr and totals as JSON on stdout.")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run on a Ray cluster (RAY_ADDRESS) or a local Ray instance (requires the optional extra `ray`).",
        ),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "--engines",
            metavar="N",
            min=1,
            max=1000,
            help="Number of engines with --ray. Default: one per machine.",
            show_default=False,
        ),
    ] = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of IN has `custom_id`, `method` (POST), `url` (/v1/chat/completions) and `body`. The matching line of OUT
    has `custom_id` and `response`, with the `status_code` and `body` that the HTTP API would return. If a request
    fails, its line contains an error, and the other requests continue. The loaded model answers all requests, whatever
    `model` they name.

    After Ctrl-C or a crash, run the same command again to continue: completed answers are neither lost nor repeated,
    with or without --ray. If the engine fails, it is loaded again; a request that makes it fail twice gets an error. If
    a line of IN has been changed, use a new OUT. The exit code is 9 if OUT is complete but contains errors.
    """
    if ray and fetch:
        raise typer.BadParameter(
            "cannot be combined with --ray: run `notso pull` on each machine first", param_hint="--fetch"
        )
    if not requests.is_file():
        raise typer.BadParameter("IN must be a regular file, not a pipe, because it is read twice", param_hint="IN")
    if answers.exists() and answers.samefile(requests):
        raise typer.BadParameter("IN and OUT are the same file", param_hint="OUT")
    source = BatchInput(requests)
    with BatchOutput(answers, source.ids) as sink:
        already_done = len(sink.done)
        if already_done == len(source.ids):
            _print_summary(source, already_done, 0, 0, as_json)
            _exit_if_any_failed(sink)
            return
        engine = None
        chosen: dict[str, Any] = {"context_tokens": context, "threads": threads, "kv": kv, "device": device}
        if not ray:
            load = partial(engines.open_engine, model, **chosen, fetch=fetch)
            # Loaded only now, because a batch that is already complete needs no engine. Reloads are silent, because
            # their messages would disturb the progress bar.
            engine = BatchEngine(load(silent=as_json), partial(load, silent=True))
        with Interruption() as interruption, terminal.progress(as_json=as_json) as report:
            if engine is None:
                chosen["model"] = model
                result: BatchRun | Tally = answer_on_cluster(source, sink, interruption, report, chosen, count)
            else:
                try:
                    notice = engines.demo_notice(engine.get().info)
                    if notice and not as_json:
                        terminal.note(notice)
                    result = run = BatchRun(engine, source, sink, interruption, report)
                    run.answer_all()
                finally:
                    engine.close()
        _print_summary(source, already_done, result.answered, result.failed, as_json)
    if interruption.requested():
        terminal.note("Stopped. Run the same command again to continue.")
        raise typer.Exit(exit_codes.INTERRUPTED)
    _exit_if_any_failed(sink)


def _exit_if_any_failed(sink: BatchOutput) -> None:
    # Requests that failed in earlier runs count as well: otherwise, running the command again would report success.
    if sink.failed:
        raise typer.Exit(exit_codes.REQUESTS_FAILED)


def _print_summary(source: BatchInput, already_done: int, answered: int, failed: int, as_json: bool) -> None:
    left = len(source.ids) - already_done - answered - failed
    if as_json:
        terminal.print_json(
            {"requests": len(source.ids), "there": already_done, "answered": answered, "failed": failed, "left": left}
        )
        return
    parts = [f"{answered} answered", f"{failed} failed"] if answered or failed else []
    parts += [f"{already_done} already done"] if already_done else []
    parts += [f"{left} left"] if left else []
    terminal.note(f"{terminal.counted(len(source.ids), 'request')}{': ' * bool(parts)}{', '.join(parts)}.")


# Request lines per Ray task: twice an engine's default concurrency, to keep the engine busy. If an engine is lost, Ray
# repeats its whole task, so larger tasks would waste more work.
REQUESTS_PER_TASK = 32
# A worker pauses for this long after a failed task, so that the other workers get most of the remaining tasks.
FAILED_PAUSE_SECONDS = 60.0


@dataclass(slots=True)
class Tally:
    answered: int = 0
    failed: int = 0


class BatchWorker:
    # Ray Data calls an instance once per task, with the requests of that task.
    def __init__(self, **engine_options: Any) -> None:
        model, self._workers = engine_options.pop("model"), engine_options.pop("workers")
        load = partial(engines.open_engine, model, **engine_options, silent=True)
        self._engine = BatchEngine(load(), load)
        self._name, self._has_failed = secrets.token_hex(8), False

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        from notso.smollm3.errors import NotsoError

        # An exception would end the batch on all machines. Therefore, if the engine keeps failing, its error is
        # appended to the completed answers.
        task = _WorkerBatch([_line_from_json(text) for text in batch["request"]])
        if self._has_failed:
            time.sleep(FAILED_PAUSE_SECONDS)
        failures = []
        try:
            BatchRun(self._engine, task, task, Interruption(), lambda what, done, total: None).answer_all()
        except NotsoError as error:
            failures.append({"failure": str(error), "worker": self._name, "workers": self._workers})
        self._has_failed = bool(failures)
        return {"answer": [json.dumps(answer) for answer in (*task.answers.values(), *failures)]}


class _WorkerBatch:
    # Source and sink for the BatchRun of one Ray task.
    def __init__(self, lines: list[RequestLine]) -> None:
        self._lines = lines
        self.ids = {line.id for line in lines}
        self.done: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}

    def lines(self) -> Iterable[RequestLine]:
        return self._lines

    def write(self, answer: dict[str, Any]) -> None:
        self.answers[answer["id"]] = answer
        self.done.add(answer["id"])


def answer_on_cluster(
    source: BatchInput,
    sink: BatchOutput,
    interruption: Interruption,
    report: terminal.Progress,
    engine_options: Mapping[str, Any],
    count: int | None,
) -> Tally:
    """Answer requests on a Ray cluster, and return after the last one or Ctrl-C. Raises ClusterError or EngineError."""
    control = cluster.ray_control()
    from notso.cluster.batch_pool import answers
    from notso.smollm3.errors import EngineError
    from notso.smollm3.values.engine_config import expand_home

    model = engine_options["model"]
    # If `model` is a path, make it absolute, because each worker may have a different working directory.
    if model is not None and (path := Path(expand_home(model))).exists():
        model = path.absolute()
    options = {**engine_options, "model": model}
    missing = [_line_to_json(line) for line in source.lines() if line.id not in sink.done]
    tally, failure = Tally(), ENGINE_FAILED
    failing = set[str]()  # workers that have failed since the last answer
    report("answering", len(sink.done), len(source.ids))
    with control.ray_connection(os.environ.get("RAY_ADDRESS"), os.cpu_count() or 1):
        for text in answers(missing, BatchWorker, options, engines=count, requests_per_call=REQUESTS_PER_TASK):
            answer = json.loads(text)
            if "failure" in answer:
                failure = answer["failure"]
                failing.add(answer["worker"])
                if len(failing) >= answer["workers"]:
                    raise EngineError(failure)
                continue
            failing.clear()
            sink.write(answer)
            if answer["error"] is None:
                tally.answered += 1
            else:
                tally.failed += 1
            report("answering", len(sink.done), len(source.ids))
            if interruption.requested():
                break
        else:
            if len(sink.done) < len(source.ids):
                raise EngineError(failure)
    return tally


def _line_to_json(line: RequestLine) -> str:
    # Encode the content in Base64, because it may not be valid UTF-8.
    content = None if line.content is None else base64.b64encode(line.content).decode()
    return json.dumps({**asdict(line), "content": content})


def _line_from_json(text: str) -> RequestLine:
    fields = json.loads(text)
    content = fields["content"]
    return RequestLine(**{**fields, "content": None if content is None else base64.b64decode(content)})
