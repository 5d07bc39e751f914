"""`notso bench`: measure speed, load time, memory use and memory read bandwidth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from notso.cli import engines, options, terminal
from notso.cli.engines import model_file

EXAMPLES = """\
  notso bench SmolLM3-Q4_K_M.gguf
  notso bench SmolLM3-Q4_K_M.gguf --prefill 512 --prefill 512@8192 --depth 0 --depth 4096 --json
  notso bench SmolLM3-Q4_K_M.gguf --compare llama.cpp
  notso bench SmolLM3-Q4_K_M.gguf --share my-machine.json"""


def bench(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="GGUF file. Default: the model `run` would use.")
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill",
            metavar="TOKENS[@DEPTH]",
            help="Measure prefill of this many tokens, after DEPTH tokens of context; repeatable. Default: 512.",
        ),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            "--depth",
            metavar="TOKENS",
            min=0,
            help="Measure decoding after this many tokens of context; repeatable. Default: 0.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            metavar="N",
            min=0,
            help="Measure decoding of this many concurrent sequences (0: skip); repeatable. Default: 16.",
        ),
    ] = None,
    decode: Annotated[
        int, typer.Option("--decode", metavar="TOKENS", min=2, help="Tokens to decode per measurement.")
    ] = 32,
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", min=1, help="Number of rounds; medians are reported.")
    ] = 3,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="PEER",
            help="Also measure llama.cpp or openvino (must be installed), alternating with notso.",
        ),
    ] = None,
    weights: options.Weights = "auto",
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    share: Annotated[
        Path | None,
        typer.Option("--share", metavar="OUT.json", help="Also write the results to this file. Nothing is uploaded."),
    ] = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Measure speed, load time and memory use.

    Measurements of prefill, decoding and the machine's memory bandwidth alternate. The results are medians, with
    minimum and maximum.
    """
    if share is not None:
        options.check_output_path(share, True, "--share", replaces=False)
    from notso.smollm3.diagnostics.benchmark import BenchmarkPlan, run_benchmark

    path = model_file(file, silent=as_json)
    plan = BenchmarkPlan(
        prefill=tuple(map(_parse_prefill, prefill or ("512",))),
        depths=tuple(depth or (0,)),
        batches=tuple(n for n in (batch or (16,)) if n),
        decode_tokens=decode,
        repeats=repeat,
        context_tokens=context,
        threads=threads,
        device=device,
        kv=kv,
        weights=weights,
        compare=compare,
    )
    engines.exit_on_lost_model_file()
    with terminal.progress(as_json=as_json) as report:
        result = run_benchmark(path, plan, report)
    # Print the results before writing the file, so that they are not lost if writing fails.
    if as_json:
        terminal.print_json(result)
    else:
        terminal.print_lines(table(result))
    if share is not None:
        share.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        terminal.note(f"Machine, figures and fingerprint written to {share}.")


def _parse_prefill(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,17})(?:@(\d{1,18}))?", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is neither TOKENS nor TOKENS@DEPTH", param_hint="--prefill")
    return int(found.group(1)), int(found.group(2) or 0)


def table(result: dict[str, Any]) -> list[str]:
    machine, model = result["machine"], result["model"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}, "
        f"Python {machine['python']}, {machine['stolen_percent']:.1f} % steal time",
        f"{model['name']}, {terminal.gigabytes(model['size_bytes'])}, {model['kernels']} kernels, "
        f"{model['threads']} threads, device {model['device']}, context {model['context_tokens']:,}, "
        f"{model['kv_format']} cache, weights {result['weights']}, median of {result['repeats']}",
        f"fingerprint {result['fingerprint']} ({model['kv_format']} cache): the same on every machine",
        "",
    ]
    rows = [["what", "median", "min", "max", "share of ceiling"]]
    rows.append(["read bandwidth, GB/s", *_median_and_range(result, "bandwidth_gb_s"), "-"])
    rows.append(["read in order, GB/s", *_median_and_range(result, "bandwidth_in_order_gb_s"), "-"])
    rows.append(["byte products, 10^12/s", *_median_and_range(result, "byte_tops", 2), "-"])
    for label, row in _labeled_rates(result):
        share = f"{100 * row['roofline']:.0f} %" if "roofline" in row else "-"
        if "roofline_beside" in row:
            share += f", {100 * row['roofline_beside']:.0f} % of the bandwidth at that time"
        rows.append([label, *_median_and_range(row, "tok_s"), share])
    if "peer" in result:
        ratios = [row["ratio"] for _, row in _labeled_rates(result["ratio"])]
        for (label, row), ratio in zip(_labeled_rates(result["peer"]), ratios, strict=True):
            rows.append([f"{result['peer']['name']}: {label}", *_median_and_range(row, "tok_s"), f"ours {ratio:.2f}x"])
    for row in result["first_token"]:
        rows.append(
            [f"first token, {row['cached']:,} cached + {row['tokens']} new, ms", *_median_and_range(row, "ms"), "-"]
        )
    rows.append(["choosing a token, default sampling, ms", f"{result['sampling_ms']['default']:.2f}", "", "", "-"])
    rows.append(["load from warm pages, s", f"{result['load_s']:.2f}", "", "", "-"])
    rows.append(["resident, MB", f"{result['memory']['rss_mb']:.0f}", "", "", "-"])
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    cells = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = " | ".join("-" * width for width in widths)
    return [*lines, f"| {cells[0]} |", f"| {ruler} |", *(f"| {cell} |" for cell in cells[1:])]


def _labeled_rates(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rates = []
    for row in result["prefill"]:
        at = f" at {row['depth']:,}" if row["depth"] else ""
        rates.append((f"prefill {row['tokens']:,}{at}, tok/s", row))
    rates += [(f"decode at {row['depth']:,}, tok/s", row) for row in result["decode"]]
    return rates + [(f"{row['sequences']} sequences, tok/s", row) for row in result["batch"]]


def _median_and_range(row: dict[str, Any], name: str, digits: int = 1) -> list[str]:
    return [f"{row[key]:.{digits}f}" for key in (name, f"{name}_min", f"{name}_max")]
