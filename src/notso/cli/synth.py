"""`notso synth`: a model file of random weights in SmolLM3's shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso synth random-3b.gguf
  notso synth small.gguf --layers 4 --hidden 512 --ffn 1024 --heads 8 --kv 2"""


def synthesise(
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.", show_default=False)],
    layers: Annotated[int, typer.Option("--layers", min=1, metavar="N", help="Layers.")] = 36,
    hidden: Annotated[
        int, typer.Option("--hidden", min=256, metavar="N", help="Hidden size, a multiple of 256.")
    ] = 2048,
    ffn: Annotated[
        int, typer.Option("--ffn", min=256, metavar="N", help="Feed-forward size, a multiple of 256.")
    ] = 11008,
    heads: Annotated[int, typer.Option("--heads", min=1, metavar="N", help="Query heads.")] = 16,
    kv: Annotated[int, typer.Option("--kv", min=1, metavar="N", help="Key and value heads.")] = 4,
    vocab: Annotated[int, typer.Option("--vocab", min=256, metavar="N", help="Vocabulary size.")] = 128_256,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json. Default: the demo's, padded.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same file.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Write random weights in SmolLM3-3B's shapes.

    The full size has 326 tensors: 216 Q4_K, 37 Q6_K, 73 F32, 1.91 GB. It answers nonsense, at the real model's speed.
    """
    if out.exists() and not force:
        raise typer.BadParameter(f"{out} is there already; --force replaces it", param_hint="OUT.gguf")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}; make it first", param_hint="OUT.gguf")
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
    terminal.note(
        f"{terminal.gigabytes(out.stat().st_size)} of random weights; `notso bench {out}` measures with them."
    )
    terminal.say(str(out))
