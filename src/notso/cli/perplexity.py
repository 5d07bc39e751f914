"""`notso perplexity`: measure a model's perplexity on a text, and its KL divergence from another model."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import engines, options, terminal

if TYPE_CHECKING:
    from notso.smollm3.diagnostics.perplexity import Divergence, Estimate, Perplexity

EXAMPLES = """\
  notso perplexity SmolLM3-Q4_K_M.gguf wiki.test.raw
  notso perplexity SmolLM3-Q4_K_M.gguf wiki.test.raw --kl SmolLM3-F16.gguf"""


def perplexity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file.")],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="UTF-8 text file.")],
    kl: Annotated[
        Path | None,
        typer.Option("--kl", metavar="BASE", help="Also report the KL divergence from this model.", show_default=False),
    ] = None,
    window: Annotated[int, typer.Option("--window", metavar="TOKENS", min=16, help="Window length in tokens.")] = 512,
    kv: options.KV = "f16",
    threads: options.Threads = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model's perplexity on a text file.

    Like llama.cpp, scores the second half of each window of tokens. With --kl, also compares the model with a base
    model, by Kullback-Leibler divergence and by how often both rank the same token first.
    """
    from notso.smollm3.diagnostics.perplexity import divergence
    from notso.smollm3.diagnostics.perplexity import perplexity as measure

    words = options.read_text(text, "TEXT")
    load = partial(engines.open_engine, context_tokens=window, threads=threads, kv=kv, device=device)
    engine = load(file, silent=as_json)
    with engine, terminal.progress(as_json=as_json) as report:
        if kl is None:
            found: Perplexity | Divergence = measure(
                engine, words, window=window, progress=lambda done, total: report("windows", done, total)
            )
        else:
            with load(kl, silent=True) as base:
                found = divergence(
                    engine, base, words, window=window, progress=lambda done, total: report("windows", done, total)
                )
    if as_json:
        terminal.print_json(asdict(found))
    else:
        terminal.print_lines(describe(found))


def describe(found: Perplexity | Divergence) -> list[str]:
    from notso.smollm3.diagnostics.perplexity import Perplexity

    if isinstance(found, Perplexity):
        return [f"perplexity  {_format_estimate(found.perplexity)} ({found.tokens:,} tokens scored)"]
    rows = [
        ["perplexity", f"{_format_estimate(found.model.perplexity)} ({found.model.tokens:,} tokens scored)"],
        ["perplexity of the base", _format_estimate(found.base.perplexity)],
        ["KL divergence, mean", _format_estimate(found.kl)],
        ["KL divergence, largest", f"{found.largest_kl:.4f}"],
        ["KL divergence, 99%", f"{found.kl_99:.4f}"],
        ["KL divergence, median", f"{found.median_kl:.4f}"],
        ["RMS change of p", f"{100 * found.rms_change:.2f}%"],
        ["same token on top", f"{100 * found.same_top.value:.2f} ± {100 * found.same_top.error:.2f}%"],
    ]
    return terminal.columns(rows)


def _format_estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.4f} ± {estimate.error:.4f}"
