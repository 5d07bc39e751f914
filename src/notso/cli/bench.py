"""`notso bench`: rates, load time and memory, beside the machine's own read bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso bench SmolLM3-Q4_K_M.gguf
  notso bench SmolLM3-Q4_K_M.gguf --depth 0 --depth 4096 --json
  notso bench SmolLM3-Q4_K_M.gguf --compare llama.cpp"""


def bench(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A GGUF file. Default: the model `run` would use.", show_default=False),
    ] = None,
    prefill: Annotated[
        list[int] | None,
        typer.Option("--prefill", metavar="TOKENS", min=1, help="Prompt length, repeatable. Default: 512."),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option("--depth", metavar="TOKENS", min=0, help="Decode after so many tokens, repeatable. Default: 0."),
    ] = None,
    decode: Annotated[int, typer.Option("--decode", metavar="TOKENS", min=2, help="Tokens decoded each time.")] = 32,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Rounds; the median counts.")] = 3,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="PEER", help="Measure llama.cpp in turns (needs llama-cpp-python)."),
    ] = None,
    weights: options.Weights = "auto",
    context: options.Context = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Measure speed, load time and memory.

    Prefill, decode and the machine's read bandwidth are measured in turns; medians count, with minimum and maximum.
    """
    from notso.smollm3.benchmark import SHORT_PROMPT_TOKENS, BenchmarkPlan, run_benchmark
    from notso.smollm3.hub import resolve_model

    path = resolve_model(file)
    prompts, depths = tuple(prefill or (512,)), tuple(depth or (0,))
    longest = max(*prompts, *(max(d, SHORT_PROMPT_TOKENS) for d in depths)) + decode
    plan = BenchmarkPlan(
        prefill_tokens=prompts,
        depths=depths,
        decode_tokens=decode,
        repeats=repeat,
        context_tokens=context or -(-longest // 1024) * 1024,
        threads=threads,
        weights=weights,
        compare=compare,
    )
    with terminal.progress(as_json=as_json) as report:
        result = run_benchmark(path, plan, report)
    if as_json:
        terminal.say_json(result)
        return
    for line in table(result):
        terminal.say(line)


def table(result: dict[str, Any]) -> list[str]:
    """The result for people: a machine line, then Markdown rows ready to paste."""
    machine, model = result["machine"], result["model"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}, "
        f"Python {machine['python']}, {machine['stolen_percent']:.1f} % of the time stolen",
        f"{model['name']}, {terminal.gigabytes(model['size_bytes'])}, {model['kernels']} kernels, "
        f"{model['threads']} threads, context {model['context_tokens']:,}, "
        f"weights on {result['weights']}, median of {result['repeats']}",
        "",
    ]
    rows = [["what", "median", "min", "max", "share of ceiling"]]
    rows.append(["read bandwidth, GB/s", *_spread(result, "bandwidth_gb_s"), "-"])
    rows += [[f"prefill {r['tokens']:,}, tok/s", *_spread(r, "tok_s"), "-"] for r in result["prefill"]]
    rows += [
        [f"decode at {r['depth']:,}, tok/s", *_spread(r, "tok_s"), f"{100 * r['roofline']:.0f} %"]
        for r in result["decode"]
    ]
    for kind, key, name in (("prefill", "tokens", "prefill {:,}"), ("decode", "depth", "decode at {:,}")):
        for row, ratio in zip(result.get("peer", {}).get(kind, []), result.get("ratio", {}).get(kind, []), strict=True):
            label = f"{result['peer']['name']}: {name.format(row[key])}, tok/s"
            rows.append([label, *_spread(row, "tok_s"), f"ours {ratio['ratio']:.2f}x"])
    rows.append(["load from warm pages, s", f"{result['load_s']:.2f}", "", "", "-"])
    rows.append(["resident, MB", f"{result['memory']['rss_mb']:.0f}", "", "", "-"])
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    cells = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = " | ".join("-" * width for width in widths)
    return [*lines, f"| {cells[0]} |", f"| {ruler} |", *(f"| {cell} |" for cell in cells[1:])]


def _spread(row: dict[str, Any], name: str) -> list[str]:
    return [f"{row[key]:.1f}" for key in (name, f"{name}_min", f"{name}_max")]
