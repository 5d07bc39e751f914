"""Writes RESULTS.md and the README's table from the JSON files in results/: `make results`, or

python benchmarks/report.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->"
PEERS = ("llama-cpp", "openvino")  # whose runs the README shows

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


GAPS = (("p50", "gap, median"), ("p99", "gap, 99 %"), ("max", "gap, longest"))
STREAMS = (("complete", "complete"), ("left", "left half read"), ("told to wait", "told to wait"))

Row = dict[str, Any]
RATES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("prefill", lambda r: f"prefill {r['tokens']:,}" + (f" at {r['depth']:,}" if r["depth"] else "")),
    ("decode", lambda r: f"decode at {r['depth']:,}"),
    ("batch", lambda r: f"{r['sequences']} sequences"),
)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all but the first column are numbers."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ruler, *rows]) + "\n"


def about(machine: dict[str, Any], *more: str) -> str:
    """The machine in a sentence, without which no figure counts."""
    said = [
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB",
        f"{' '.join(machine['features'])}, {machine['system']}",
        f"Python {machine['python']}, numpy {machine['numpy']}",
        f"{machine['stolen_percent']:.1f} % of the time stolen",
        *more,
    ]
    return ", ".join(said) + ".\n"


def spread(row: dict[str, Any], name: str = "tok_s") -> str:
    """Median and range."""
    return f"{row[name]:.4g} ({row[f'{name}_min']:.4g} to {row[f'{name}_max']:.4g})"


def bench(name: str, result: dict[str, Any]) -> str:
    """One run of `notso bench`, with its peer where it had one."""
    model, peer = result["model"], result.get("peer")
    title = f"## {name}\n" if peer is None else f"## Beside {peer['name']} {peer['version']} ({name})\n"
    described = about(
        result["machine"],
        f"{model['kernels']} kernels",
        f"{model['threads']} threads" if model.get("device", "cpu") == "cpu" else model["device"],
        f"{model['name']}, {model['size_bytes'] / 1e9:.2f} GB, context {model['context_tokens']:,}",
        f"{model['kv_format']} cache, weights on {result['weights']}",
        f"medians of {result['repeats']} rounds with their range",
    )
    head = ["", "notso", "share of the ceiling"] + ([peer["name"], "ratio"] if peer else [])
    rows = []
    for kind, label in RATES:
        for i, row in enumerate(result[kind]):
            share = f"{row['roofline']:.2f}" if "roofline" in row else ""
            cells = [f"{label(row)}, tokens/s", spread(row), share]
            if peer:
                cells += [spread(peer[kind][i]), f"**{result['ratio'][kind][i]['ratio']:.2f}**"]
            rows.append(cells)
    empty = [""] * (len(head) - 2)
    for row in result["first_token"]:
        rows.append([f"first token, {row['cached']:,} cached + {row['tokens']} new, ms", spread(row, "ms"), *empty])
    if model.get("device", "cpu") == "cpu":
        rows += host_rows(result, empty)
    theirs = ["", f"{peer['load_s']:.2f}", ""] if peer else [""]
    rows.append(["load, s", f"{result['load_s']:.2f}", *theirs])
    theirs = ["", f"{peer['memory']['rss_mb']:,.0f}", ""] if peer else [""]
    rows.append(["resident memory, MB", f"{result['memory']['rss_mb']:,.0f}", *theirs])
    text = [title, described, table(head, rows)]
    if peer:
        used = sorted({row["configuration"] for kind in ("prefill", "decode", "batch") for row in peer[kind]})
        text.append(f"Fastest configurations of {peer['name']}: {'; '.join(used)}.\n")
    return "\n".join(text)


def host_rows(result: dict[str, Any], empty: list[str]) -> list[list[str]]:
    """What the CPU and its memory could do beside the run."""
    rows = [["read bandwidth, GB/s", spread(result, "bandwidth_gb_s"), *empty]]
    if "bandwidth_in_order_gb_s" in result:  # older runs read in order only
        rows.append(["read in order, GB/s", spread(result, "bandwidth_in_order_gb_s"), *empty])
    rows.append(["byte products, 10^12 operations/s", spread(result, "byte_tops"), *empty])
    return rows


def threads(result: dict[str, Any]) -> str:
    """Runs of `notso bench` that differ in --threads alone."""
    runs, peer = result["threads"], result["llama.cpp"]["tok_s"]
    rows = [
        [
            str(run["model"]["threads"]),
            f"{run['prefill'][0]['tok_s']:.4g}",
            f"{run['decode'][0]['tok_s']:.4g}",
            f"{run['decode'][0]['roofline_beside']:.2f}",
            f"{run['bandwidth_gb_s']:.4g}",
            f"{run['byte_tops']:.3g}",
            f"{peer[str(run['model']['threads'])]['prefill']:.4g}",
            f"{peer[str(run['model']['threads'])]['decode']:.3g}",
        ]
        for run in runs
    ]
    prompt = runs[0]["prefill"][0]["tokens"]
    head = ["threads", f"prefill {prompt}, tokens/s", "decode, tokens/s", "share of the ceiling"]
    head += ["read bandwidth, GB/s", "byte products, 10^12 operations/s", "llama.cpp, prefill", "llama.cpp, decode"]
    described = about(runs[0]["machine"], f"{runs[0]['model']['kernels']} kernels", runs[0]["model"]["name"])
    described += f"\nllama.cpp, afterwards on the same file: {result['llama.cpp']['version']}.\n"
    return "\n".join(["## Threads\n", described, table(head, rows)])


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


def kv_by_weights(result: dict[str, Any]) -> str:
    """benchmarks/kv_quality.py --weights."""
    rows = [
        [row["weights"], *(f"{row[name]:.2e}" for name in ("f16", "k8v8")), row["auto"]]
        for row in result["kv_by_weights"]
    ]
    return (
        "## What `--kv auto` takes by the file's format\n\n"
        f"Random weights in the shapes of SmolLM3 ({result['shape']}), {result['positions']:,} positions of random "
        "tokens: divergence in nats from the same weights as floats with a cache in half precision.\n\n"
        + table(["weights", "f16", "k8v8", "`--kv auto`"], rows)
    )


def simulation(result: dict[str, Any]) -> str:
    """benchmarks/cluster_simulation.py."""
    rows = [
        [
            f"{row['machines']}, {row['routing']}",
            f"{100 * row['cached_share']:.0f} %",
            f"{row['first_token_p50_s']:.1f}",
            f"{row['first_token_p99_s']:.1f}",
            str(row["deaths"]),
        ]
        for row in result["rows"]
    ]
    head = ["machines, routing", "prompt tokens found in a cache", "first token p50, s", "p99, s", "deaths"]
    return (
        "## Simulated: many machines\n\nNo machine ran this: it is simulated from the step costs above, "
        f"{result['minutes']:g} minutes, {result['people']:g} conversations begun a minute for each machine, which "
        f"lives {result['life_minutes']:g} minutes in the mean and is replaced after one, seed {result['seed']} "
        "(`python benchmarks/cluster_simulation.py`).\n\n" + table(head, rows)
    )


def block_types(result: dict[str, Any]) -> str:
    """benchmarks/block_types.py."""
    rows = []
    for row in sorted(result["block_types"], key=lambda row: -float(row["bits"])):
        cells = [row["type"], f"{row['bits']:.4g}"]
        for kind in ("decode", "prefill"):
            found = row[kind]
            cells += [f"{found['ours']['tok_s']:.4g}", f"{found['theirs']['tok_s']:.4g}"]
            cells += [f"**{found['ratio']:.2f}**", f"{found['best_ratio']:.2f}"]
        rows.append(cells)
    beside = ("llama.cpp", "ratio", "of the best")
    head = ["type", "bits", "decode", *beside, "prompt", *beside]
    first = result["block_types"][0]
    text = (
        "## Each block type beside llama.cpp\n\n"
        + about(
            result["machine"],
            f"{first['kernels']} kernels, one thread, processor time",
            f"the 3B's shapes with {result['layers']} layers and {result['vocab']:,} tokens, all matrices in the type",
            f"a prompt of {result['prompt']} tokens, {result['rounds']} rounds, {first['peer']}",
        )
        + f"\n{result['load']}\n\n"
        + table(head, rows)
        + "\nTokens per second of the median step; *of the best*: ratio of the fastest steps of each.\n"
    )
    if "pair" in result:
        pair = result["pair"]
        (first_name, ours), (second_name, other) = pair["decode"].items()
        other_name = second_name.replace("official", "the Q4_K_M mix")
        text += (
            f"\n{first_name} beside {other_name}, {pair['layers']} layers and {pair['vocab']:,} tokens, threads: "
            f"{pair['threads']}, decoding in turns: by processor time **{pair['processor_ratio']:.2f}** times as fast, "
            f"by the clock {pair['ratio']:.2f} (medians; {ours['tok_s']:.3g} and {other['tok_s']:.3g} tokens/s); "
            f"{ours['bytes'] / 1e9:.2f} and {other['bytes'] / 1e9:.2f} GB.\n"
        )
    return text


def type_scores(result: dict[str, Any]) -> str:
    """tests/golden/type_scores.py."""
    rows = [
        [row["type"], *(f"{row[name]:.4f}" for name in ("exact", "ours", "theirs"))]
        + [f"{row[name]:.2g}" for name in ("ours_kl", "theirs_kl")]
        for row in result["type_scores"]
    ]
    return (
        "## Each block type's answers beside llama.cpp's\n\n"
        f"{result['date']}, {result['library']}. The demo model with all matrices in the type, by llama.cpp's "
        f"quantiser: nats for each of {result['type_scores'][0]['tokens']} tokens of its own answers, and the "
        "divergence from float arithmetic on the same file's numbers.\n\n"
        + table(["type", "exact", "notso", "llama.cpp", "notso's divergence", "llama.cpp's"], rows)
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


def stream_readers(result: dict[str, Any]) -> str:
    """benchmarks/stream_readers.py."""
    streams = dict(result["streams"])
    rows = [[f"{label}, ms", f"{result['gap_ms'][name]:.1f}"] for name, label in GAPS]
    rows += [["errors", f"{result['errors']:,}"], ["incomplete", f"{result['incomplete']:,}"]]
    rows += [[label, f"{streams.get(name, 0):,}"] for name, label in STREAMS]
    return (
        "## How evenly tokens come to many readers\n\n"
        + about(
            result["machine"],
            f"{result['model']}",
            f"{result['readers']} readers for {result['seconds']:.0f} s",
            f"a load of {result['load_before']:.2f} before",
        )
        + "\n"
        + table(["", "measured"], rows)
        + f"\n{result['gaps']:,} gaps between two pieces of one answer, where the readers take them. Those that come "
        "while as many wait as may (32) are told when to come back, and do; all come in one moment here.\n"
    )


def page_typing(result: dict[str, Any]) -> str:
    """benchmarks/page_typing.py."""
    rows = [[name, f"{ms:.1f}"] for name, ms in result["key_ms"].items()]
    return (
        "## Typing in a long chat\n\n"
        + about(
            result["machine"],
            f"Chromium {result['chromium']}",
            f"{result['messages']} messages shown",
            f"a load of {result['load_before']:.2f} before" + (", real-time priority" if result["real_time"] else ""),
        )
        + "\n"
        + table(["from a key to the frame that shows it", "ms"], rows)
        + f"\n{result['keys']} keys, one every 80 ms.\n"
    )


def chats(result: dict[str, Any]) -> str:
    """benchmarks/chats.py."""
    rows, machines = [], set()
    for part, figures in result["chats"].items():
        machines.add(about(figures["machine"] | {"stolen_percent": 0.0}).rpartition(", ")[0])
        share = figures["machine"].get("others_percent")
        others = "not counted" if share is None else f"{share:.0f} %"
        rows += [[label, value, others] for label, value in CHATS[part](figures)]
    return (
        f"## Many chats and long ones\n\n{'; '.join(sorted(machines))}.\n\n"
        + table(["", "measured", "other programs took"], rows)
        + "\nWhat other programs took of the processors meanwhile lengthens times, above all the longest ones.\n"
    )


def speculation(result: dict[str, Any]) -> str:
    """benchmarks/speculation.py."""
    rows = [
        [row["work"], f"{row['tokens']:,}", f"{row['steps']:,}", f"{row['speed_up']:.2f}", f"{row['worst']:.2f}"]
        for row in result["speculation"]
    ]
    steps = result["step_ms"]
    took = "Steps were not timed: planning figures stand in.\n"
    if steps:
        took = table(["rows of a step", *steps], [["ms", *(f"{ms:.0f}" for ms in steps.values())]])
    return (
        f"## What guessing ahead is worth\n\n{about(result['machine'])}\n"
        + table(["work", "tokens", "steps", "speed-up", "worst text"], rows)
        + f"\nTokens of {result['tokenizer']}. The speed-up is tokens over the cost of the steps.\n\n"
        + took
    )


def gap_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    label = f"between two tokens while another chat's {it['prompt_tokens']:,} are read, median / 99 % / longest, ms"
    gaps = f"{it['gap_ms_p50']:.0f} / {it['gap_ms_p99']:.0f} / {it['gap_ms_max']:.0f}"
    return [("decode step, ms", f"{it['step_ms']:.0f}"), (label, gaps), ("the prompt took, s", f"{it['prompt_s']:.1f}")]


def turn_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("decode step in the first turn, ms", f"{it['step_ms']:.0f}")]
    for row in it["turns"]:
        rows.append((f"second turn's first token, {row['new_tokens']} new, ms", spread(row, "ms")))
    return rows


def next_turn_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("decode step in the second turn, ms", f"{it['step_ms']:.0f}")]
    for row in it["turns"]:
        asked = f"asked {row['pause_s']:.0f} s after" if row["pause_s"] else "asked at once after"
        answer = "thoughts and an answer" if row["thinks"] else "an answer"
        new = row["prompt_tokens"] - row["cached_tokens"]
        rows.append((f"first token of a turn {asked} {answer} ({new} new), ms", spread(row, "ms")))
    return rows


def typed_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("decode step in the second turn, ms", f"{it['step_ms']:.0f}")]
    for row in it["turns"]:
        said = f"read while typed, {row['pause_s']:.0f} s before" if row["pause_s"] else "not read while typed"
        answer = "thoughts and an answer" if row["thinks"] else "an answer"
        label = f"first token of {row['words']} words after {answer}, {said} ({row['new_tokens']} new), ms"
        rows.append((label, spread(row, "ms")))
    return rows


def restore_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for row in it["rows"]:
        rows.append((f"{it['tokens']:,} tokens brought back, files in {row['files_in']}, s", f"{row['restore_s']:.2f}"))
        rows.append(("- to the first token, s", f"{row['first_token_s']:.2f}"))
    return [*rows, (f"reading those files from the disk alone ({it['files_mb']:.0f} MB), s", f"{it['read_s']:.2f}")]


def memory_rows(it: dict[str, Any]) -> list[tuple[str, str]]:
    label = f"resident memory with {it['context_tokens']:,} tokens in {it['kv_format']}, at its highest"
    peak = it["peak_mb"]
    return [
        (label, f"{peak:,.0f} MB, {peak / 1073.741824:.2f} GiB"),
        ("- decode step there, ms", f"{it['step_ms']:.0f}"),
    ]


CHATS = {
    "gap": gap_rows,
    "turn": turn_rows,
    "next-turn": next_turn_rows,
    "typed": typed_rows,
    "restore": restore_rows,
    "memory-64k": memory_rows,
    "memory-128k": memory_rows,
}


def readme_table() -> str:
    """The runs beside each peer in one table: ours in its own run each time, since only turns of one run compare."""
    runs = [json.loads((RESULTS / f"{name}.json").read_text()) for name in PEERS]
    head = ["tokens/s"] + [
        cell for run in runs for cell in ("notso", f"{run['peer']['name']} {run['peer']['version']}", "ratio")
    ]
    rows = []
    for kind, label in RATES:
        for i, row in enumerate(runs[0][kind]):
            cells = [label(row)]
            for run in runs:
                ratio = f"**{run['ratio'][kind][i]['ratio']:.2f}**"
                cells += [f"{run[kind][i]['tok_s']:.3g}", f"{run['peer'][kind][i]['tok_s']:.3g}", ratio]
            rows.append(cells)
    below: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("share of what reading allows, at 0", lambda run: f"{run['decode'][0]['roofline']:.2f}"),
        ("read bandwidth, GB/s", lambda run: f"{run['bandwidth_gb_s']:.1f}"),
        ("resident memory, MB", lambda run: f"{run['memory']['rss_mb']:,.0f}"),
    )
    for name, of in below:
        rows.append([name] + [cell for run in runs for cell in (of(run), "", "")])
    return table(head, rows)


def main() -> None:
    """Every JSON file by what it holds."""
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + readme_table() + END + rest.partition(END)[2])
    order = ("threads", "types", "scores", "chats", "speculation", "server")
    order += ("stream_readers", "typing", "simulation", "kernels", "kv")
    parts: dict[str, list[str]] = {kind: [] for kind in ("bench", *order)}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "threads" in result:
            parts["threads"].append(threads(result))
        elif "block_types" in result:
            parts["types"].append(block_types(result))
        elif "type_scores" in result:
            parts["scores"].append(type_scores(result))
        elif "families" in result:
            parts["kernels"].append(kernels(result))
        elif "formats" in result:
            parts["kv"].append(kv_quality(result))
        elif "kv_by_weights" in result:
            parts["kv"].append(kv_by_weights(result))
        elif "simulated" in result:
            parts["simulation"].append(simulation(result))
        elif "chats" in result:
            parts["chats"].append(chats(result))
        elif "speculation" in result:
            parts["speculation"].append(speculation(result))
        elif "gap_ms" in result:
            parts["stream_readers"].append(stream_readers(result))
        elif "key_ms" in result:
            parts["typing"].append(page_typing(result))
        elif "readers" in result:
            parts["server"].append(server(result))
        elif "bandwidth_gb_s" in result:
            parts["bench"].append(bench(path.stem, result))
    sections = [HEAD, *parts["bench"], CITED, *(section for kind in order for section in parts[kind])]
    (HERE / "RESULTS.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
