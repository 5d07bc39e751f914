"""`notso synth`: generate a model file with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso synth random-3b.gguf
  notso synth small.gguf --layers 4 --hidden 512 --ffn 1024 --heads 8 --kv 2"""


def synthesise(
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="Output file.")],
    layers: Annotated[int, typer.Option("--layers", min=1, metavar="N", help="Number of layers.")] = 36,
    hidden: Annotated[
        int, typer.Option("--hidden", min=256, metavar="N", help="Hidden size (multiple of 256).")
    ] = 2048,
    ffn: Annotated[
        int, typer.Option("--ffn", min=256, metavar="N", help="Feed-forward size (multiple of 256).")
    ] = 11008,
    heads: Annotated[int, typer.Option("--heads", min=1, metavar="N", help="Number of query heads.")] = 16,
    kv: Annotated[int, typer.Option("--kv", min=1, metavar="N", help="Number of key/value heads.")] = 4,
    vocab: Annotated[int, typer.Option("--vocab", min=256, metavar="N", help="Vocabulary size.")] = 128_256,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="tokenizer.json to use. Default: the demo model's, padded.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Random seed; the same seed gives the same file.")
    ] = 0,
    force: options.Force = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Generate a model file with random weights (for tests).

    At full size, the file is 1.91 GB, with 326 tensors: 216 Q4_K, 37 Q6_K and 73 F32. The model generates nonsense at
    the speed of SmolLM3-3B.
    """
    options.check_output_path(out, force, "OUT.gguf")
    from notso.smollm3.diagnostics.synth import write_synthetic

    with terminal.progress(in_bytes=True) as report:
        write_synthetic(
            out,
            layers=layers,
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv,
            vocab=vocab,
            tokenizer=tokenizer,
            seed=seed,
            progress=lambda done, total: report("writing", done, total),
        )
    terminal.note(f"{terminal.gigabytes(out.stat().st_size)} of random weights; measure them with `notso bench {out}`.")
    terminal.print_line(str(out))
