"""`notso batch`: answer a file of requests, as many at a time as the engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.batch_files import BatchInput, BatchOutput
from notso.cli.batch_run import BatchRun
from notso.cli.interruption import Interruption

if TYPE_CHECKING:
    from notso.cli.batch_elsewhere import Tally

EXAMPLES = """\
  notso batch questions.jsonl answers.jsonl
  notso batch --model SmolLM3-Q4_K_M.gguf --json in.jsonl out.jsonl"""


def batch(
    requests: Annotated[
        Path,
        typer.Argument(metavar="IN", exists=True, dir_okay=False, help="Requests, one JSON object to a line."),
    ],
    answers: Annotated[Path, typer.Argument(metavar="OUT", dir_okay=False, help="Answers, in the order they end.")],
    model: options.Model = None,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Progress as lines of JSON on stderr, the sum on stdout.")] = (
        False
    ),
    ray: Annotated[
        bool, typer.Option("--ray", help="By the machines of a Ray (RAY_ADDRESS; else this one): the extra ray.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--engines", metavar="N", min=1, max=1000, help="With --ray. One a machine.", show_default=False),
    ] = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A line has `custom_id`, `method` (POST), `url` (/v1/chat/completions) and `body`; its answer has `custom_id` and
    `response`, whose `status_code` and `body` are what the HTTP API would have said. A line that cannot be answered
    gets its error there, and the others go on. `model` in a body is taken as a name for the model that is loaded.

    The same command goes on where it was stopped, by Ctrl-C or a kill: answers that are there are neither lost nor
    made again, with --ray or without. A line that was changed since is another request, and wants another OUT. When
    every line has its answer or its error the exit code is 0.
    """
    if not requests.is_file():
        raise typer.BadParameter("IN must be a file: it is read twice, which a pipe cannot bear", param_hint="IN")
    if answers.exists() and answers.samefile(requests):
        raise typer.BadParameter("IN and OUT are the same file", param_hint="OUT")
    source = BatchInput(requests)
    with BatchOutput(answers, source.ids) as sink:
        there = len(sink.done)
        if there == len(source.ids):
            _report(source, there, 0, 0, as_json)
            return
        with Interruption() as interruption, terminal.progress(as_json=as_json) as report:
            if ray:
                from notso.cli.batch_elsewhere import answer_elsewhere

                chosen = {"model": model, "context_tokens": context, "threads": threads, "kv": kv, "device": device}
                told: BatchRun | Tally = answer_elsewhere(source, sink, interruption, report, chosen, count)
            else:
                engine = engines.open_engine(model, context, threads, kv=kv, device=device, silent=as_json)
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
        terminal.note("Stopped; the same command goes on from here.")
        raise typer.Exit(exit_codes.INTERRUPTED)


def _report(source: BatchInput, there: int, answered: int, failed: int, as_json: bool) -> None:
    left = len(source.ids) - there - answered - failed
    if as_json:
        terminal.say_json(
            {"requests": len(source.ids), "there": there, "answered": answered, "failed": failed, "left": left}
        )
        return
    parts = [f"{answered} answered", f"{failed} failed"] if answered or failed else []
    parts += [f"{there} were there already"] if there else []
    parts += [f"{left} left"] if left else []
    terminal.note(f"{len(source.ids)} requests: {', '.join(parts) or 'none'}.")
