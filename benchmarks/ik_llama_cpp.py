"""Run `notso bench` and ik_llama.cpp's own benchmark programs alternately.

    python benchmarks/ik_llama_cpp.py build/synth-3b.gguf ../ik_llama.cpp/build/bin --rounds 5

The folder contains `llama-bench` and `llama-batched-bench`. Each configuration is measured once; the rounds use the
fastest one for each figure, and only they count. The JSON has the keys of `notso bench --compare`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PROMPT, DECODED, SEQUENCES = 512, 16, 16
CONFIGURATIONS = {
    "f16 cache, repacked": ["-rtr", "1", "-fa", "0"],
    "f16 cache, flash attention on, repacked": ["-rtr", "1", "-fa", "1"],
    "q8_0 cache, flash attention on, repacked": ["-rtr", "1", "-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"],
    "q8_0 cache, flash attention on": ["-rtr", "0", "-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"],
}


def printed(command: Sequence[str]) -> str:
    # llama-batched-bench prints its table to the standard error stream.
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout if run.stdout.strip() else run.stderr


def bench_rate(programs: Path, file: Path, threads: int, test: list[str]) -> Callable[[list[str]], float]:
    def rate(options: list[str]) -> float:
        command = [str(programs / "llama-bench"), "-m", str(file), "-t", str(threads), "-r", "1", "-o", "json"]
        return float(json.loads(printed([*command, *test, *options]))[-1]["avg_ts"])

    return rate


def batch_rate(programs: Path, file: Path, threads: int) -> Callable[[list[str]], float]:
    def rate(options: list[str]) -> float:
        values = dict(zip(options[::2], options[1::2], strict=True))
        flags = ["-rtr"] if values.pop("-rtr") == "1" else []  # a flag without a value in this program
        flags += [text for pair in values.items() for text in pair]
        command = [str(programs / "llama-batched-bench"), "-m", str(file), "-t", str(threads), *flags]
        command += ["-c", str(SEQUENCES * 64), "-npp", "32", "-ntg", str(DECODED), "-npl", str(SEQUENCES)]
        rows = re.findall(r"^\|(.*)\|$", printed(command), re.MULTILINE)
        return float(rows[-1].split("|")[7])  # S_TG t/s

    return rate


def figures(values: list[float]) -> dict[str, float]:
    return {"tok_s": statistics.median(values), "tok_s_min": min(values), "tok_s_max": max(values)}


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first run, with its figures replaced by the medians of all runs."""
    result = dict(runs[0], repeats=len(runs))
    for kind in ("prefill", "decode", "batch"):
        for i, row in enumerate(result[kind]):
            same = [run[kind][i] for run in runs]
            row |= figures([each["tok_s"] for each in same])
            shares = [name for name in row if name.startswith("roofline")]
            row |= {name: statistics.median(each[name] for each in same) for name in shares}
    for name in ("bandwidth_gb_s", "bandwidth_in_order_gb_s", "byte_tops"):
        values = figures([run[name] for run in runs])
        result |= {name + suffix: values["tok_s" + suffix] for suffix in ("", "_min", "_max")}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4096, help="tokens of context of the second decode measurement")
    parser.add_argument("--version", default="", help="commit of ik_llama.cpp")
    parser.add_argument("--out", type=Path, default=RESULTS / "ik-llama-cpp.json")
    given = parser.parse_args()
    where = (given.programs, given.file, given.threads)
    measured = {
        ("prefill", 0): bench_rate(*where, ["-p", str(PROMPT), "-n", "0"]),
        ("decode", 0): bench_rate(*where, ["-p", "0", "-n", str(DECODED)]),
        ("decode", 1): bench_rate(*where, ["-p", "0", "-n", "0", "-gp", f"{given.depth},{DECODED}"]),
        ("batch", 0): batch_rate(*where),
    }
    command = [sys.executable, "-m", "notso", "bench", str(given.file), "--json", "--repeat=1", "--weights=packed"]
    command += ["--context=8192", f"--prefill={PROMPT}", "--depth=0", f"--depth={given.depth}", f"--batch={SEQUENCES}"]
    command += [f"--decode={DECODED}", f"--threads={given.threads}"]
    ours, theirs, fastest = [], {key: [] for key in measured}, {}
    for key, rate in measured.items():
        rates = {name: rate(options) for name, options in CONFIGURATIONS.items()}
        fastest[key] = max(rates, key=lambda name: rates[name])
    for number in range(given.rounds):
        ours.append(json.loads(printed(command)))
        for key, rate in measured.items():
            theirs[key].append(rate(CONFIGURATIONS[fastest[key]]))
        print(
            f"round {number + 1} of {given.rounds}: {[round(each[-1], 1) for each in theirs.values()]}", file=sys.stderr
        )
    result = merged(ours)
    peer: dict[str, Any] = {"name": "ik_llama.cpp", "version": given.version, "prefill": [], "decode": [], "batch": []}
    ratio: dict[str, Any] = {"prefill": [], "decode": [], "batch": []}
    for (kind, i), values in theirs.items():
        peer[kind].append(figures(values) | {"configuration": fastest[kind, i]})
        ratio[kind].append({"ratio": result[kind][i]["tok_s"] / peer[kind][i]["tok_s"]})
    given.out.write_text(json.dumps(result | {"peer": peer, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
