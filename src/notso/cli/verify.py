"""`notso verify`: check the integrity of a GGUF file and the results of the kernels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.model_files import model_file

if TYPE_CHECKING:
    from notso.smollm3.diagnostics.verification import TensorCheck, Verification

EXAMPLES = """\
  notso verify SmolLM3-Q4_K_M.gguf
  notso verify SmolLM3-Q4_K_M.gguf --golden
  notso verify model.gguf --json"""


def verify(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="GGUF file. Default: the model `run` would use.", show_default=False),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    golden: Annotated[
        bool,
        typer.Option("--golden", help="Only compare with reference results that transformers computed for SmolLM3-3B."),
    ] = False,
    golden_file: Annotated[
        Path | None,
        typer.Option(
            "--golden-file", metavar="JSON", help="Compare with another model's reference results.", show_default=False
        ),
    ] = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Check a file's hash, structure, prompts and tensors.

    Compares the SHA-256 with the published ones, renders prompts with the tokenizer and chat template, and compares
    each tensor's quantized product with that of its dequantized reference; the largest error is shown. Exit code 3 if a
    check fails.
    """
    from notso.smollm3.diagnostics.verification import verify_file
    from notso.smollm3.hub import registry

    engines.prepare_for_a_lost_file()
    if golden or golden_file:
        _compare(model_file(file, silent=as_json) or registry.demo_path(), golden_file, as_json)
        return
    with terminal.progress(in_bytes=True, as_json=as_json) as report:
        found = verify_file(model_file(file, silent=as_json) or registry.demo_path(), progress=report)
    damage = damaged_copy(found)
    if as_json:
        terminal.say_json({**found.as_dict(), "damaged_copy_of": damage})
    else:
        for line in describe(found, tensors=tensors):
            terminal.say(line)
        if damage:
            terminal.warn(
                f"Same size as {damage}, but different content: run `notso pull --force` to download it again."
            )
        for problem in found.problems:
            terminal.warn(problem)
    if not found.ok or damage:
        raise typer.Exit(exit_codes.BAD_MODEL)


def _compare(path: Path, goldens: Path | None, as_json: bool) -> None:
    from notso.smollm3.diagnostics.goldens import RELEASED, check_goldens

    with terminal.waiting("computing the goldens", silent=as_json):
        found = check_goldens(path, goldens or RELEASED)
    if as_json:
        terminal.say_json({**asdict(found), "path": str(path), "ok": found.ok})
    else:
        rows = [["", "found", "allowed", ""]]
        for check in found.checks:
            rows.append([check.what, f"{check.found:.3f}", f"{check.allowed:.3f}", "ok" if check.ok else "wrong"])
        terminal.say(f"{terminal.on_one_line(str(path))}: {found.bits:.1f} bits per weight")
        terminal.say(terminal.on_one_line(f"{found.name} ({found.source})"))
        for line in terminal.columns(rows, right=(1, 2)):
            terminal.say(line)
        terminal.say("right" if found.ok else "wrong: this file or this build does not reproduce the reference results")
    if not found.ok:
        raise typer.Exit(exit_codes.BAD_MODEL)


def damaged_copy(found: Verification) -> str | None:
    """Return the published file of equal size but another hash."""
    from notso.smollm3.hub import registry

    if found.known_as is not None:
        return None
    return next((known.name for known in registry.KNOWN_FILES if known.size_bytes == found.size_bytes), None)


def describe(found: Verification, *, tensors: bool) -> list[str]:
    known = f"the published {found.known_as}" if found.known_as else "not a published file"
    lines = [
        f"{terminal.on_one_line(found.path)}: {terminal.gigabytes(found.size_bytes)}",
        f"SHA-256    {found.sha256} ({known})",
        f"structure  {found.structure_problem or 'ok'}",
        f"prompts    {found.prompt_problem or 'ok'}",
    ]
    rows = [["type", "tensors", "rows multiplied", "worst error", "allowed", "in"]]
    for name in sorted({check.format for check in found.tensors}):
        rows.append(_summary(name, [check for check in found.tensors if check.format == name]))
    lines += terminal.columns(rows, right=(1, 2, 3, 4))
    if tensors:
        listed = [[c.name, c.format, *_figures(c), c.problem or "ok"] for c in found.tensors]
        lines += ["", *terminal.columns([["tensor", "type", "worst error", "allowed", ""], *listed], right=(2, 3))]
    lines.append("ok" if found.ok else f"{len(found.problems)} problem{'s' if len(found.problems) != 1 else ''}")
    return lines


def _summary(name: str, checks: list[TensorCheck]) -> list[str]:
    rows = sum(check.rows_checked for check in checks)
    worst = max(checks, key=lambda check: check.worst_error or 0.0)
    figures = _figures(worst)
    return [name, str(len(checks)), f"{rows:,}", *figures, worst.name if worst.worst_error is not None else "-"]


def _figures(check: TensorCheck) -> list[str]:
    if check.worst_error is None or check.tolerance is None:
        return ["-", "-"]
    return [f"{check.worst_error:.2e}", f"{check.tolerance:.0e}"]
