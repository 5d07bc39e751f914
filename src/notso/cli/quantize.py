"""`notso quantize`: quantize a floating-point model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso quantize SmolLM3-F16.gguf SmolLM3-Q4_K_M.gguf
  notso quantize my-finetune my-finetune-Q5_K_M.gguf --type Q5_K_M --imatrix-text samples.txt"""

_TITLES = {"converting": "converting to GGUF", "measuring": "computing the importance matrix", "writing": "writing"}


def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="IN", exists=True, help="GGUF file in F16, BF16 or F32, or Hugging Face folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="Output file.")],
    mix: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Quantization type: Q4_K_M, Q5_K_M, Q6_K or Q8_0.")
    ] = "Q4_K_M",
    imatrix_text: Annotated[
        Path | None,
        typer.Option(
            "--imatrix-text", metavar="FILE", help="Compute an importance matrix from this text.", show_default=False
        ),
    ] = None,
    threads: options.Threads = None,
    force: options.Force = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Quantize a floating-point model.

    The types are those of llama.cpp, which can read the output. With --imatrix-text, an importance matrix is computed
    first, so that the weights that matter most for this text are quantized with the smallest errors. Ideally, use about
    100 kB of text similar to the prompts that the model will get.
    """
    options.check_output_path(out, force, "OUT.gguf")
    text = None
    if imatrix_text is not None:
        text = imatrix_text.name, options.read_text(imatrix_text, "--imatrix-text")
    from notso.smollm3.conversion.quantizer import quantize as quantize_model

    with ExitStack() as bars:
        progress_bars: dict[str, terminal.Progress] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in progress_bars:
                bars.close()
                progress_bars[what] = bars.enter_context(terminal.progress(in_bytes=what in ("converting", "writing")))
            progress_bars[what](_TITLES[what], done, total)

        quantize_model(source, out, mix, text, threads, report)
    terminal.note(f"{terminal.gigabytes(out.stat().st_size)}. To try the model, run `notso run --model {out}`.")
    terminal.print_line(str(out))
