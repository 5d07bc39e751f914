"""Measure the cost of a plugin's process: its start, its memory, a call, and processing of a row of logits.

    python benchmarks/plugins.py [PLUGIN [TOOL [PROCESSOR]]]

Without arguments, it creates the plugin of `notso plugin new` in a temporary folder and measures that.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from notso.plugins.new_plugin import write_plugin
from notso.plugins.process import PluginProcess

CALLS, ROWS, VOCAB, TOKENS = 500, 200, 128_256, 2_048
NAME = "cost"


def installed(folder: Path) -> None:
    """Create the template's plugin in `folder`, so that child processes find it as if it were installed."""
    write_plugin(NAME, folder / NAME)
    metadata = folder / f"{NAME}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[notso.plugins]\n{NAME} = {NAME}:PLUGIN\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / NAME)])


def milliseconds(work: Callable[[], object], times: int) -> dict[str, float]:
    """Return the median and the 99th percentile of the duration of a call."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(1000 * (time.perf_counter() - began))
    return {"median_ms": round(statistics.median(spent), 3), "p99_ms": round(sorted(spent)[int(0.99 * times)], 3)}


def resident_mb(process: PluginProcess) -> float:
    """Return the resident memory of the plugin's process (Linux)."""
    lines = Path(f"/proc/{process._process.pid}/status").read_text().splitlines()  # type: ignore[union-attr]
    return round(int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000, 1)


def main() -> None:
    """Measure and print JSON."""
    names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if not names:
            installed(Path(folder))
        plugin, tool, processor = (*names, *(NAME, f"{NAME}_count_words", f"{NAME}_never_twice")[len(names) :])
        process = PluginProcess(plugin)
        began = time.perf_counter()
        process.start()
        process.ready.wait()
        started = time.perf_counter() - began
        if process.state != "on":
            sys.exit(f"{plugin}: {process.failure}")
        given = {
            "name": tool,
            "arguments": {"text": "a b"},
            "called_in": {"owner": "", "chat_id": "", "attachments": {}},
        }
        memory = resident_mb(process)
        logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
        tokens = np.arange(TOKENS, dtype=np.int32)
        row, history = logits.data.cast("B"), tokens.data.cast("B")
        found = {
            "plugin": plugin,
            "start_ms": round(1000 * started, 1),
            "resident_mb": memory,
            "call": milliseconds(lambda: process.call("tool", given, "tool", 10.0), CALLS),
            f"row of {VOCAB:,} logits": milliseconds(lambda: process.process_logits(processor, history, row), ROWS),
            "resident_mb_with_numpy": resident_mb(process),
            "load_average": os.getloadavg()[0],
            "python": sys.version.split()[0],
        }
        process.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
