"""`notso quantise`: a model file of floats made into one of blocks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso quantise SmolLM3-F16.gguf SmolLM3-Q4_K_M.gguf
  notso quantise my-finetune my-finetune-Q5_K_M.gguf --type Q5_K_M --imatrix-text of-my-field.txt"""

_TITLES = {"joining": "joining the folder", "reading": "windows of the text", "writing": "writing"}


def quantise(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", exists=True, help="A GGUF file in F16, BF16 or F32, or a Hugging Face folder."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.", show_default=False)],
    mix: Annotated[str, typer.Option("--type", metavar="TYPE", help="Q4_K_M, Q5_K_M, Q6_K or Q8_0.")] = "Q4_K_M",
    imatrix_text: Annotated[
        Path | None,
        typer.Option(
            "--imatrix-text",
            metavar="FILE",
            help="Read this text first, and keep best what it needs.",
            show_default=False,
        ),
    ] = None,
    threads: options.Threads = None,
    force: options.Force = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Make a model file smaller.

    The mixes are llama.cpp's, and it reads the file too. With --imatrix-text the model reads a text first, some 100 kB
    like those it will answer; weights by which that text's numbers are multiplied most then lose least (an importance
    matrix).
    """
    options.require_free_place(out, force, "OUT.gguf")
    text = None
    if imatrix_text is not None:
        text = imatrix_text.name, options.read_text(imatrix_text, "--imatrix-text")
    from notso.smollm3.conversion.quantiser import quantise as make

    with ExitStack() as bars:
        shown: dict[str, terminal.Progress] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in shown:
                bars.close()
                shown[what] = bars.enter_context(terminal.progress(in_bytes=what in ("joining", "writing")))
            shown[what](_TITLES[what], done, total)

        make(source, out, mix, text, threads, report)
    terminal.note(f"{terminal.gigabytes(out.stat().st_size)}; `notso run --model {out}` asks it.")
    terminal.say(str(out))
