"""`notso convert`: convert a Hugging Face checkpoint to GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso convert SmolLM3-3B SmolLM3-Q4_K_M.gguf
  notso convert my-finetune my-finetune-f16.gguf --type F16"""


def convert(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", exists=True, file_okay=False, help="Folder with config.json, safetensors and tokenizer."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="Output file.")],
    mix: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Q4_K_M, Q5_K_M, Q6_K, Q8_0, F16, BF16 or F32, or one of the less common Q5_K, Q4_K, Q4_1, Q4_0.",
        ),
    ] = "Q4_K_M",
    force: options.Force = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF.

    Tensors are converted a few rows at a time to keep memory use low. Converting the 3B model to a K-quant takes
    minutes. A checkpoint with a setting that this engine does not implement is refused, and the error names the
    setting.
    """
    options.check_output_path(out, force, "OUT.gguf")
    from notso.smollm3.conversion.converter import convert as convert_folder

    with terminal.progress(in_bytes=True) as report:
        convert_folder(folder, out, mix, lambda done, total: report("writing", done, total))
    terminal.note(f"{terminal.gigabytes(out.stat().st_size)}; try it with `notso run --model {out}`.")
    terminal.print_line(str(out))
