"""`notso tune`: fine-tune a LoRA adapter, and compare answers before and after."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from notso.cli import engines, options, terminal
from notso.cli.engines import model_file

if TYPE_CHECKING:
    from notso.smollm3 import Event
    from notso.smollm3.tuning.trainer import TrainingResult

EXAMPLES = """\
  notso tune chats.jsonl --out mine.gguf
  notso tune facts.jsonl -m SmolLM3-3B --out facts.gguf --epochs 5 --ask "Who waters the plants?"
  notso serve --adapter facts=facts.gguf"""

ANSWER_TOKENS = 256


def tune(
    data: Annotated[
        Path, typer.Argument(metavar="DATA.jsonl", exists=True, dir_okay=False, help="Dataset of conversations.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="ADAPTER.gguf", help="Output file.", show_default=False)],
    model: options.Model = None,
    merge: Annotated[
        Path | None,
        typer.Option("--merge", metavar="OUT.gguf", help="Also write the merged model in Q4_K_M.", show_default=False),
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            "--ask",
            metavar="QUESTION",
            help="Question to answer before and after tuning; repeatable.",
            show_default=False,
        ),
    ] = None,
    rehearse: Annotated[
        Path | None,
        typer.Option(
            "--rehearse",
            metavar="QUESTIONS.txt",
            help="Prompts to rehearse besides the built-in ones: the untuned model's answers to them are added to the "
            "training data, to limit forgetting.",
            show_default=False,
        ),
    ] = None,
    no_rehearsal: Annotated[
        bool, typer.Option("--no-rehearsal", help="Train on the dataset only, without rehearsal.")
    ] = False,
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Number of epochs.")] = 3,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="LoRA rank.")] = 16,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="RATE", help="Learning rate (AdamW).")
    ] = 2e-4,
    batch_rows: Annotated[int, typer.Option("--batch", metavar="ROWS", help="Number of rows per optimizer step.")] = 8,
    max_tokens: Annotated[
        int, typer.Option("--max-length", metavar="TOKENS", help="Maximum tokens per row; longer rows are truncated.")
    ] = 1024,
    holdout: Annotated[
        float, typer.Option("--holdout", metavar="SHARE", help="Fraction of the rows to hold out for validation.")
    ] = 0.1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Delete the checkpoint and start over.")] = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
    force: options.Force = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Fine-tune a LoRA adapter on conversations.

    Trains LoRA on the weight matrices of all layers with TRL and PEFT (requires the optional extra `tune`). The loss
    covers only assistant messages. An interrupted run continues from its checkpoint in the folder ADAPTER.gguf.tuning.
    """
    options.check_output_path(out, force, "--out")
    if merge is not None:
        options.check_output_path(merge, force, "--merge")
        options.check_distinct_outputs(out, merge, "--merge")
    from notso.smollm3.hub.registry import demo_path
    from notso.smollm3.tuning import adapter_writer, base_model, trainer
    from notso.smollm3.tuning import training_rows as row_files
    from notso.smollm3.tuning.trainer import Recipe
    from notso.smollm3.values.engine_config import expand_home

    recipe = Recipe(
        rank=rank,
        alpha=2.0 * rank,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_rows=batch_rows,
        max_tokens=max_tokens,
        holdout=holdout,
        seed=seed,
    )
    trainer.require_libraries()
    base = model_file(model, silent=as_json) or demo_path()
    given = None if model is None else Path(expand_home(model))
    source = given if given is not None and given.is_dir() else base
    folder = out.with_name(f"{out.name}.tuning")
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    questions = ask or []
    if no_rehearsal and rehearse is not None:
        raise typer.BadParameter("cannot be combined with --rehearse", param_hint="--no-rehearsal")
    prompts = options.read_text(rehearse, "--rehearse") if rehearse is not None else ""
    # The date is part of every prompt, so another date would change the training rows of a resumed run.
    day = trainer.run_start_date(folder) or date.today()
    writer = row_files.RowWriter.of(base, recipe.max_tokens, day)
    rows = writer.read(data)
    before = _generate_answers(base, None, questions, threads)
    trained, held_out = row_files.split(rows, recipe.holdout, recipe.seed)
    if not held_out and not as_json:
        terminal.note(f"Too few rows for a validation split ({len(rows)}); no validation loss is reported.")
    parameters = base_model.count_parameters(base)
    with terminal.progress(as_json=as_json) as report:
        rehearsal = []
        if not no_rehearsal:
            rehearsal = _rehearsal_rows(base, prompts, folder, recipe.max_tokens, day, threads, report)
        rehearsed = []
        for row in rehearsal:
            with suppress(ValueError):  # raised if the truncated conversation contains no answer
                rehearsed.append(writer.row(row))
        digest = recipe.digest(data.read_bytes(), _file_digest(base), json.dumps(rehearsal).encode())
        outcome = trainer.train(
            partial(base_model.load, source),
            recipe,
            trained,
            rehearsed,
            held_out,
            folder,
            digest,
            day,
            parameters,
            threads,
            report,
        )
    adapter_writer.write_adapter(outcome.peft_folder, base, out, out.stem)
    if merge is not None:
        adapter_writer.write_merged(outcome.peft_folder, base, merge, "Q4_K_M", threads)
    after = _generate_answers(base, out, questions, threads)
    _show_outcome(
        model, out, merge, outcome, len(trained), len(rehearsed), len(held_out), questions, before, after, as_json
    )
    shutil.rmtree(folder)


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _generate_answers(base: Path, adapter: Path | None, questions: Sequence[str], threads: int | None) -> list[str]:
    if not questions:
        return []
    from notso.smollm3 import Message, RequestOptions, SamplingParams

    # Generate greedily and without thinking, so that the answers before and after tuning can be compared.
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    request_options = RequestOptions(thinking=False, adapter=None if adapter is None else "tuned")
    adapters = [] if adapter is None else [f"tuned={adapter}"]
    with engines.open_engine(base, threads=threads, device="cpu", silent=True, adapters=adapters) as engine:
        conversations = [[Message("user", question)] for question in questions]
        return [_collect_text(engine.generate(each, sampling, request_options)) for each in conversations]


def _collect_text(events: Iterator[Event]) -> str:
    return "".join(event.text for event in events if event.kind == "text").strip()


def _rehearsal_rows(
    base: Path,
    prompts: str,
    folder: Path,
    max_tokens: int,
    day: date,
    threads: int | None,
    report: terminal.Progress,
) -> list[dict[str, Any]]:
    from notso.smollm3.tuning import trainer, training_rows

    shipped = training_rows.SHIPPED.read_text("utf-8")
    conversations = training_rows.read(shipped, training_rows.SHIPPED.name)
    conversations += training_rows.read(prompts, "--rehearse")
    # The stored rows may have been generated by another model. They are reused only if the folder contains the record
    # of a run: in this case, `trainer.train` raises an error if that run used another model.
    file = folder / f"rehearsal-{hashlib.sha256((shipped + prompts).encode()).hexdigest()[:16]}.json"
    if trainer.run_start_date(folder) is not None:
        with suppress(OSError, ValueError):
            rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
            return rows
    with engines.open_engine(base, threads=threads, device="cpu", silent=True) as engine:
        rows = training_rows.generate_answers(engine, conversations, max_tokens, day, report)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows), "utf-8")
    return rows


def _show_outcome(
    model: Path | None,
    out: Path,
    merge: Path | None,
    outcome: TrainingResult,
    trained: int,
    rehearsed: int,
    held_out: int,
    questions: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    as_json: bool,
) -> None:
    answers = [
        {"question": question, "before": first, "after": second}
        for question, first, second in zip(questions, before, after, strict=True)
    ]
    if as_json:
        terminal.print_json(
            {
                "adapter": str(out),
                "merged": str(merge) if merge is not None else None,
                "rows": trained,
                "rows_rehearsed": rehearsed,
                "rows_held_out": held_out,
                "steps": outcome.steps,
                "resumed_at": outcome.resumed_at,
                "loss": outcome.loss,
                "held_out_before": outcome.held_out_before,
                "held_out_after": outcome.held_out_after,
                "answers": answers,
            }
        )
        return
    resumption = f", resumed at step {outcome.resumed_at}" if outcome.resumed_at else ""
    with_rehearsal = f" and {rehearsed:,} rehearsed rows" if rehearsed else ""
    terminal.note(
        f"{outcome.steps} steps over {trained:,} rows{with_rehearsal}{resumption}; final loss {outcome.loss:.3f}"
    )
    if outcome.held_out_before is not None and outcome.held_out_after is not None:
        terminal.note(
            f"validation loss over {held_out:,} rows: {outcome.held_out_before:.3f} before, "
            f"{outcome.held_out_after:.3f} after"
        )
    for each in answers:
        terminal.print_line(f"? {each['question']}\n  before: {each['before']}\n  after:  {each['after']}")
    terminal.print_line(str(out))
    if merge is not None:
        terminal.print_line(str(merge))
    base = ["--model", str(model)] if model is not None else []
    terminal.note(f"Try it with `{shlex.join(['notso', 'run', *base, '--adapter', f'tuned={out}', 'PROMPT'])}`.")
