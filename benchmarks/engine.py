"""Run `notso bench` for each kernel family of this CPU, alternately, so that other load affects all of them.

    python benchmarks/engine.py build/synth-3b.gguf --rounds 3 -- --prefill 512 --depth 0

Arguments after `--` are passed to `notso bench`. Results are stored in benchmarks/results/local/; the printed table has
the medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from notso.qtensor import kernel_choice

KEPT = Path(__file__).parent / "results" / "local"


def measure(file: Path, kernels: str, options: list[str]) -> dict[str, Any]:
    """Run `notso bench` in a separate process with a given kernel family."""
    command = [sys.executable, "-m", "notso", "bench", str(file), "--json", "--repeat", "1", *options]
    run = subprocess.run(
        command,
        env={**os.environ, kernel_choice.KERNELS_VARIABLE: kernels},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def rates(result: dict[str, Any]) -> dict[str, float]:
    """Return the results of a run by column name."""
    found = {"GB/s": result["bandwidth_gb_s"]}
    found |= {f"prefill {row['tokens']}": row["tok_s"] for row in result["prefill"]}
    return found | {f"decode at {row['depth']}": row["tok_s"] for row in result["decode"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kernels", nargs="+", default=kernel_choice.available_kernels(), choices=kernel_choice.available_kernels()
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = parser.parse_args(sys.argv[1:split])
    options = sys.argv[split + 1 :]

    results: dict[str, list[dict[str, Any]]] = {kernels: [] for kernels in given.kernels}
    for round_number in range(given.rounds):
        for kernels in given.kernels:
            print(f"round {round_number + 1} of {given.rounds}: {kernels}", file=sys.stderr)
            results[kernels].append(measure(given.file, kernels, options))
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / f"engine-{time.strftime('%Y%m%d-%H%M%S')}.json"
    kept.write_text(json.dumps(results, indent=1))

    columns = list(rates(results[given.kernels[0]][0]))
    print(f"| kernels | {' | '.join(columns)} |")
    print(f"| --- | {' | '.join('---:' for _ in columns)} |")
    for kernels, runs in results.items():
        medians = [statistics.median(rates(run)[column] for run in runs) for column in columns]
        print(f"| {kernels} | {' | '.join(f'{median:.1f}' for median in medians)} |")
    print(f"\nresults written to {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
