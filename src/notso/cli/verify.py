"""`notso verify`: check the integrity of a GGUF file and the results of the kernels."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.engines import model_file

if TYPE_CHECKING:
    from notso.smollm3.diagnostics.verification import TensorCheck, Verification
    from notso.smollm3.values.engine_config import KVChoice

_MAX_RECEIPT_BYTES = 16 << 20
EXAMPLES = """\
  notso verify SmolLM3-Q4_K_M.gguf
  notso verify SmolLM3-Q4_K_M.gguf --golden
  notso verify --receipt answer.json --model SmolLM3-Q4_K_M.gguf"""


def verify(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="GGUF file. Default: the model `run` would use.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    golden: Annotated[
        bool, typer.Option("--golden", help="Only compare with transformers' reference results for SmolLM3-3B.")
    ] = False,
    golden_file: Annotated[
        Path | None,
        typer.Option(
            "--golden-file", metavar="JSON", help="Compare with another model's reference results.", show_default=False
        ),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            metavar="JSON",
            help="Generate the answer of this receipt again and compare it token by token.",
            show_default=False,
        ),
    ] = None,
    transcript: Annotated[
        Path | None,
        typer.Option(
            "--transcript",
            metavar="JSON",
            help="Unsealed receipt of the same answer; required if the receipt is sealed (contains only hashes).",
            show_default=False,
        ),
    ] = None,
    model: options.Model = None,
    adapter: options.Adapters = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Check a file's hash, structure, prompt rendering and tensors.

    Compares the SHA-256 with the published ones, and loads the tokenizer and the chat template. For sampled rows of
    each matrix, compares the kernels' products with those of the dequantized rows; the largest error is shown. The exit
    code is 3 if a check fails.

    With --receipt, these checks are skipped: the tokens of the receipt are sampled again, and the first one that
    differs is reported. The exit code is 1 if a token differs or the receipt is from another model.
    """
    from notso.smollm3.diagnostics.verification import verify_file
    from notso.smollm3.hub import registry

    if receipt is not None:
        _check_receipt(receipt, transcript, file or model, adapter or [], as_json)
        return
    if transcript is not None or adapter:
        raise typer.BadParameter(
            "this option needs --receipt", param_hint="--transcript" if transcript else "--adapter"
        )
    file = file or model
    engines.exit_on_lost_model_file()
    if golden or golden_file:
        _compare_with_goldens(model_file(file, silent=as_json) or registry.demo_path(), golden_file, as_json)
        return
    with terminal.progress(in_bytes=True, as_json=as_json) as report:
        found = verify_file(model_file(file, silent=as_json) or registry.demo_path(), progress=report)
    damage = damaged_copy(found)
    if as_json:
        terminal.print_json({**found.as_dict(), "damaged_copy_of": damage})
    else:
        terminal.print_lines(describe(found, tensors=tensors))
        if damage:
            terminal.warn(
                f"Same size as {damage}, but different content: run `notso pull {damage} --force` to download it again."
            )
        for problem in found.problems:
            terminal.warn(problem)
    if not found.ok or damage:
        raise typer.Exit(exit_codes.BAD_MODEL)


def _compare_with_goldens(path: Path, goldens: Path | None, as_json: bool) -> None:
    from notso.smollm3.diagnostics.goldens import RELEASED, check_goldens

    with terminal.waiting("computing the results to compare", silent=as_json):
        found = check_goldens(path, goldens or RELEASED)
    if as_json:
        terminal.print_json({**asdict(found), "path": str(path), "ok": found.ok})
    else:
        rows = [["", "found", "allowed", ""]]
        for check in found.checks:
            rows.append([check.what, f"{check.found:.3f}", f"{check.allowed:.3f}", "ok" if check.ok else "wrong"])
        terminal.print_line(f"{terminal.on_one_line(str(path))}: {found.bits:.1f} bits per weight")
        terminal.print_line(terminal.on_one_line(f"{found.name} ({found.source})"))
        terminal.print_lines(terminal.columns(rows, right=(1, 2)))
        terminal.print_line(
            "right" if found.ok else "wrong: this file or this build does not reproduce the reference results"
        )
    if not found.ok:
        raise typer.Exit(exit_codes.BAD_MODEL)


def _check_receipt(path: Path, transcript: Path | None, model: Path | None, adapters: list[str], as_json: bool) -> None:
    from notso.smollm3.errors import InvalidRequestError
    from notso.smollm3.values.engine_config import KV_CHOICES

    receipts = _receipts_in(_read_json(path, "--receipt"))
    transcripts = [None] * len(receipts) if transcript is None else _receipts_in(_read_json(transcript, "--transcript"))
    if len(transcripts) != len(receipts):
        raise typer.BadParameter(
            f"{transcript} has {terminal.counted(len(transcripts), 'receipt')}, not {len(receipts)}",
            param_hint="--transcript",
        )
    first = receipts[0] if isinstance(receipts[0], dict) else {}
    # `engine.check_receipt` refuses unknown cache formats and receipts without tokens.
    kv: KVChoice = next((each for each in KV_CHOICES if each == first.get("kv_format")), "auto")
    # A context beyond the trained length would enable YaRN, so the context is only as long as the prompt and the
    # answer, but at least 512 tokens.
    context = max(512, *map(_count_tokens, receipts))
    problem, place, tokens, start = "", None, 0, time.perf_counter()
    try:
        file = model_file(model, silent=True)
        if first.get("rope_scaling") == "yarn":
            context = engines.context_with_yarn(file, context)
        with (
            engines.open_engine(file, context_tokens=context, kv=kv, silent=True, adapters=adapters) as engine,
            terminal.waiting("generating the answer again", silent=as_json),
        ):
            start = time.perf_counter()
            for number, (receipt, unsealed) in enumerate(zip(receipts, transcripts, strict=True), start=1):
                found = engine.check_receipt(receipt, unsealed)
                problem, place = found.problem, found.place
                if problem:
                    problem = problem if len(receipts) == 1 else f"receipt {number}: {problem}"
                    break
                tokens += found.tokens
    except InvalidRequestError as error:
        problem, place = str(error), None
    seconds = time.perf_counter() - start
    if as_json:
        terminal.print_json({"ok": not problem, "problem": problem, "place": place, "tokens": tokens})
    elif problem:
        terminal.warn(terminal.on_one_line(problem))
    else:
        terminal.print_line(f"{tokens:,} tokens generated again in {seconds:.1f} s: all equal")
    if problem:
        raise typer.Exit(exit_codes.FAILED)


def _receipts_in(receipt: Any) -> list[Any]:
    # A file contains a single receipt, or a list: one for each round of tool calls, and one for the final answer.
    return receipt if isinstance(receipt, list) and receipt else [receipt]


def _count_tokens(receipt: Any) -> int:
    parts = [receipt.get(part) for part in ("prompt", "answer")] if isinstance(receipt, dict) else []
    counts = [part.get("tokens") for part in parts if isinstance(part, dict)]
    return sum(count for count in counts if type(count) is int)


def _read_json(path: Path, name: str) -> Any:
    try:
        return json.loads(options.read_text(path, name, _MAX_RECEIPT_BYTES))
    except (ValueError, RecursionError):
        raise typer.BadParameter(f"{path} is not JSON", param_hint=name) from None


def damaged_copy(found: Verification) -> str | None:
    """Return the name of the published file if the verified file is probably a damaged copy, or else None."""
    from notso.smollm3.hub import registry

    if found.known_as is not None:
        return None
    # The size alone does not suffice: merging an adapter into the published file does not change its size. In the
    # Hugging Face cache, a file is named after the published hash. The names of other copies may contain a number, such
    # as " (1)" or ".1".
    path = Path(found.path)
    return next(
        (
            known.name
            for known in registry.KNOWN_FILES
            if known.size_bytes == found.size_bytes
            and (
                re.fullmatch(rf"(?i){re.escape(Path(known.filename).stem)}[\W\d_]*\.gguf[\W\d_]*", path.name)
                or path.resolve().name == known.sha256
            )
        ),
        None,
    )


def describe(found: Verification, *, tensors: bool) -> list[str]:
    source = f"the published {found.known_as}" if found.known_as else "not a published file"
    lines = [
        f"{terminal.on_one_line(found.path)}: {terminal.gigabytes(found.size_bytes)}",
        f"SHA-256    {found.sha256} ({source})",
        f"structure  {found.structure_problem or 'ok'}",
        f"prompts    {found.prompt_problem or 'ok'}",
    ]
    rows = [["type", "tensors", "rows multiplied", "worst error", "allowed", "in"]]
    for name in sorted({check.format for check in found.tensors}):
        rows.append(_summary(name, [check for check in found.tensors if check.format == name]))
    lines += terminal.columns(rows, right=(1, 2, 3, 4))
    if tensors:
        listed = [[c.name, c.format, *_error_and_tolerance(c), c.problem or "ok"] for c in found.tensors]
        lines += ["", *terminal.columns([["tensor", "type", "worst error", "allowed", ""], *listed], right=(2, 3))]
    lines.append("ok" if found.ok else f"{len(found.problems)} problem{'s' if len(found.problems) != 1 else ''}")
    return lines


def _summary(name: str, checks: list[TensorCheck]) -> list[str]:
    rows = sum(check.rows_checked for check in checks)
    worst = max(checks, key=lambda check: check.worst_error or 0.0)
    figures = _error_and_tolerance(worst)
    return [name, str(len(checks)), f"{rows:,}", *figures, worst.name if worst.worst_error is not None else "-"]


def _error_and_tolerance(check: TensorCheck) -> list[str]:
    if check.worst_error is None or check.tolerance is None:
        return ["-", "-"]
    return [f"{check.worst_error:.2e}", f"{check.tolerance:.0e}"]
