"""Writes RESULTS.md from the JSON files beside it: `make results`, or

python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"

HEAD = """\
# Results

Made by `make results` from the JSON files in `results/`; not edited by hand. How each figure is taken: \
[docs/measuring.md](../docs/measuring.md).
"""

CITED = """\
## ik_llama.cpp, cited

Not measured here. On a virtual machine with two cores of the Granite Rapids class, 2 threads, the same shapes, 20
November 2026: prefill of 512 tokens 76 tokens/s as it is and 61 with run-time repacking; decode 5.6 and 9.17; 4, 8 and
16 sequences together 21.9, 33.5 and 38.9 tokens/s.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all but the first column are numbers."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ruler, *rows]) + "\n"


def about(machine: dict[str, Any], *more: str) -> str:
    """The machine in a sentence, without which no figure counts."""
    told = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}",
        f"Python {machine['python']}, numpy {machine['numpy']}",
        f"{machine['stolen_percent']:.1f} % of the time stolen",
        *more,
    ]
    return ", ".join(told) + ".\n"


def spread(row: dict[str, Any], name: str = "tok_s") -> str:
    """Median and range."""
    return f"{row[name]:.4g} ({row[f'{name}_min']:.4g} to {row[f'{name}_max']:.4g})"


def bench(name: str, result: dict[str, Any]) -> str:
    """One run of `notso bench`, with its peer where it had one."""
    model, peer = result["model"], result.get("peer")
    title = f"## {name}\n" if peer is None else f"## Beside {peer['name']} {peer['version']} ({name})\n"
    described = about(
        result["machine"],
        f"{model['kernels']} kernels, {model['threads']} threads",
        f"{model['name']}, {model['size_bytes'] / 1e9:.2f} GB, context {model['context_tokens']:,}",
        f"{model['kv_format']} cache, weights on {result['weights']}",
        f"medians of {result['repeats']} rounds with their range",
    )
    head = ["", "notso", "share of the ceiling"] + ([peer["name"], "ratio"] if peer else [])
    rows = []
    for kind, label in (
        ("prefill", lambda r: f"prefill {r['tokens']:,}" + (f" at {r['depth']:,}" if r["depth"] else "")),
        ("decode", lambda r: f"decode at {r['depth']:,}"),
        ("batch", lambda r: f"{r['sequences']} sequences"),
    ):
        for i, row in enumerate(result[kind]):
            share = f"{row['roofline']:.2f}" if "roofline" in row else ""
            cells = [f"{label(row)}, tokens/s", spread(row), share]
            if peer:
                cells += [spread(peer[kind][i]), f"**{result['ratio'][kind][i]['ratio']:.2f}**"]
            rows.append(cells)
    empty = [""] * (len(head) - 2)
    for row in result["first_token"]:
        rows.append([f"first token, {row['cached']:,} cached + {row['tokens']} new, ms", spread(row, "ms"), *empty])
    rows.append(["read bandwidth, GB/s", spread(result, "bandwidth_gb_s"), *empty])
    rows.append(["byte products, 10^12 operations/s", spread(result, "byte_tops"), *empty])
    theirs = ["", f"{peer['load_s']:.2f}", ""] if peer else [""]
    rows.append(["load, s", f"{result['load_s']:.2f}", *theirs])
    theirs = ["", f"{peer['memory']['rss_mb']:,.0f}", ""] if peer else [""]
    rows.append(["resident memory, MB", f"{result['memory']['rss_mb']:,.0f}", *theirs])
    text = [title, described, table(head, rows)]
    if peer:
        used = sorted({row["configuration"] for kind in ("prefill", "decode", "batch") for row in peer[kind]})
        text.append(f"Fastest configurations of {peer['name']}: {'; '.join(used)}.\n")
    return "\n".join(text)


def kernels(result: dict[str, Any]) -> str:
    """benchmarks/kernels.py."""
    families = result["families"]
    text = [
        "## Kernels beside their ceilings\n",
        about(
            result["machine"],
            f"{result['threads']} threads",
            f"medians of {result['repeats']}; GB/s are shares of the read bandwidth, GF/s of the byte products",
        ),
    ]
    ceilings = [
        [name, f"{family['read_gb_s']:.1f}", f"{family['byte_gops']:,.0f}"] for name, family in families.items()
    ]
    text.append(table(["ceiling", "reading, GB/s", "byte products, G/s"], ceilings))
    names = [row["kernel"] for row in next(iter(families.values()))["kernels"]]
    rows = [
        [
            name,
            *(f"{r['rate']:.4g} {r['unit']} ({r['share']:.2f})" for f in families.values() for r in [f["kernels"][i]]),
        ]
        for i, name in enumerate(names)
    ]
    text.append(table(["kernel", *families], rows))
    return "\n".join(text)


def kv_quality(result: dict[str, Any]) -> str:
    """benchmarks/kv_quality.py."""
    rows = [
        [
            row["format"],
            f"{row['bits']:.3g}",
            f"{100 * row['top1']:.2f} %",
            f"{row['divergence']:.2g}",
            f"{row['perplexity']:.4f}",
        ]
        for row in result["formats"]
    ]
    head = ["cache", "bits per number", "same likeliest token", "divergence, nats", "perplexity"]
    return (
        "## What the formats of the cache change\n\n"
        f"The demo model's own answers in conversations of up to {result['context']:,} tokens, "
        f"{result['formats'][0]['positions']:,} positions from 256 on, beside a cache in half precision. Its heads "
        "have 32 numbers, which share a scale; the 3B's have 128, and take 8.125, 6.125, 4.125 and 3.625 bits.\n\n"
        + table(head, rows)
    )


def server(result: dict[str, Any]) -> str:
    """benchmarks/server.py."""
    rows = [
        ["nobody reads", f"{result['tok_s_alone']:.2f}"],
        [f"{result['readers']} readers", f"{result['tok_s_with_readers']:.2f}"],
    ]
    return (
        f"## What readers cost\n\n{about(result['machine'])}\n"
        + table(["an answer streams and", "tokens/s"], rows)
        + f"\nThe readers cost {result['cost_percent']:.1f} % of the decode rate; {result['received_mb']:.1f} MB went "
        f"through the streams, and the readers themselves took {result['readers_cpu_percent']:.1f} % of a core.\n"
    )


def main() -> None:
    """Every JSON file by what it holds."""
    parts: dict[str, list[str]] = {"bench": [], "server": [], "kernels": [], "kv": []}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "families" in result:
            parts["kernels"].append(kernels(result))
        elif "formats" in result:
            parts["kv"].append(kv_quality(result))
        elif "readers" in result:
            parts["server"].append(server(result))
        elif "bandwidth_gb_s" in result:
            parts["bench"].append(bench(path.stem, result))
    sections = [HEAD, *parts["bench"], CITED, *parts["server"], *parts["kernels"], *parts["kv"]]
    (HERE / "RESULTS.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
