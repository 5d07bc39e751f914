"""`notso batch`: answer a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.batch_files import BatchInput, BatchOutput
from notso.cli.batch_run import BatchRun
from notso.cli.terminal import Interruption

if TYPE_CHECKING:
    from notso.cli.batch_elsewhere import Tally

EXAMPLES = """\
  notso batch questions.jsonl answers.jsonl
  notso batch --model SmolLM3-Q4_K_M.gguf --json in.jsonl out.jsonl"""


def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN", exists=True, dir_okay=False, help="Input file: requests, one JSON object per line."
        ),
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT", dir_okay=False, help="Output file; answers are written as they finish.")
    ],
    model: options.Model = None,
    fetch: options.Fetch = False,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress as JSON lines on stderr and totals as JSON on stdout.")
    ] = (False),
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run on a Ray cluster (RAY_ADDRESS) or on local Ray; requires the extra ray."),
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

    Each line has `custom_id`, `method` (POST), `url` (/v1/chat/completions) and `body`. Its answer has `custom_id` and
    `response`, with the `status_code` and `body` that the HTTP API would return. A request that fails gets an error
    there, and the others continue. `model` in a body can be any name: the loaded model answers.

    After Ctrl-C or a crash, run the same command again to continue: finished answers are neither lost nor repeated,
    with or without --ray. A line that has changed counts as a new request and needs another OUT. The exit code is 0
    when every line has an answer, and 9 when at least one has an error.
    """
    if not requests.is_file():
        raise typer.BadParameter("IN must be a regular file, not a pipe, because it is read twice", param_hint="IN")
    if answers.exists() and answers.samefile(requests):
        raise typer.BadParameter("IN and OUT are the same file", param_hint="OUT")
    source = BatchInput(requests)
    with BatchOutput(answers, source.ids) as sink:
        there = len(sink.done)
        if there == len(source.ids):
            _report(source, there, 0, 0, as_json)
            _end(sink)
            return
        with Interruption() as interruption, terminal.progress(as_json=as_json) as report:
            if ray:
                from notso.cli.batch_elsewhere import answer_elsewhere

                chosen = {"model": model, "context_tokens": context, "threads": threads, "kv": kv, "device": device}
                told: BatchRun | Tally = answer_elsewhere(source, sink, interruption, report, chosen, count)
            else:
                # Not before the input is read: loading takes seconds, and a finished batch needs no engine.
                engine = engines.open_engine(model, context, threads, kv=kv, device=device, silent=as_json, fetch=fetch)
                try:
                    notice = engines.demo_notice(engine.info)
                    if notice and not as_json:
                        terminal.note(notice)
                    told = run = BatchRun(engine, source, sink, interruption, report)
                    run.answer_all()
                finally:
                    engine.close()
        _report(source, there, told.answered, told.failed, as_json)
    if interruption.requested():
        terminal.note("Stopped. Run the same command again to continue.")
        raise typer.Exit(exit_codes.INTERRUPTED)
    _end(sink)


def _end(sink: BatchOutput) -> None:
    # Errors of earlier runs count, so that a repeated command does not turn a failure into success.
    if sink.failed:
        raise typer.Exit(exit_codes.REQUESTS_FAILED)


def _report(source: BatchInput, there: int, answered: int, failed: int, as_json: bool) -> None:
    left = len(source.ids) - there - answered - failed
    if as_json:
        terminal.say_json(
            {"requests": len(source.ids), "there": there, "answered": answered, "failed": failed, "left": left}
        )
        return
    parts = [f"{answered} answered", f"{failed} failed"] if answered or failed else []
    parts += [f"{there} already done"] if there else []
    parts += [f"{left} left"] if left else []
    terminal.note(f"{len(source.ids)} requests: {', '.join(parts) or 'none'}.")
