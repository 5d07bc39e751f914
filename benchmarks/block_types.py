"""Compare decode and prefill rates of each block type with llama.cpp, or two block types (or mixes) with each other.

    python benchmarks/block_types.py [TYPE ...] [--layers 4] [--rounds 5] [--out benchmarks/results/block-types.json]
    python benchmarks/block_types.py --pair IQ4_XS official --layers 36

The model has few layers with random weights in SmolLM3-3B's shapes, and all of its matrices have the type. Both engines
are loaded and measured alternately. Each uses one thread and is measured by the CPU time of its process, which other
load on the machine affects little. llama.cpp uses its defaults and repacks weights if it can; NOTSO_PEER_PYTHON is a
Python interpreter with llama-cpp-python. Rates are medians over the rounds. --pair compares two types within notso.
Existing results in --out are kept, unless their type is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from notso.qtensor import FORMATS, FORMATS_BY_NAME
from notso.smollm3 import Engine
from notso.smollm3.diagnostics.benchmark import EngineMeter, StolenTime, describe_machine
from notso.smollm3.diagnostics.peers import PeerProcess, Task
from notso.smollm3.diagnostics.synth import write_synthetic

TYPES = [format.name for format in FORMATS.values() if not format.is_float]
CONTEXT = 1024
DECODED = 16


def load(file: Path, threads: int | None) -> Engine:
    """Load an engine for the benchmark: without speculative decoding, with packed weights."""
    return Engine.load(
        file, context_tokens=CONTEXT, threads=threads, weights="packed", max_num_seqs=1, speculation=False
    )


class Rate:
    """Durations of steps, in seconds; each step processes `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.steps: list[float] = []

    def figures(self) -> dict[str, float]:
        """Return the tokens per second of the median step and of the fastest step."""
        return {"tok_s": self.tokens / statistics.median(self.steps), "best": self.tokens / min(self.steps)}


def processor_time(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid(3) returns


def beside_peer(name: str, file: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a type in both engines. The decode time excludes prefill and the first token."""
    engine = load(file, 1)
    try:
        with PeerProcess("llama.cpp", file, CONTEXT, 1) as peer:
            meter = EngineMeter(engine, 1)
            sides = {"ours": (meter.measure, os.getpid()), "theirs": (peer.measure, peer.pid)}

            def spent(side: str, task: Task) -> float:
                measure, pid = sides[side]
                before = processor_time(pid)
                measure(task)
                return processor_time(pid) - before

            rates = {(side, kind): Rate(1) for side in sides for kind in ("decode", "prefill")}
            for number in range(given.rounds + 1):
                for side in sides if number % 2 else reversed(sides):
                    decode = spent(side, ("decode", DECODED + 1, 0)) - spent(side, ("decode", 1, 0))
                    prompt = spent(side, ("prefill", given.prompt, 0))
                    if number:  # the first round warms up caches and pages
                        rates[side, "decode"].steps.append(decode / DECODED)
                        rates[side, "prefill"].steps.append(prompt / given.prompt)
            row: dict[str, Any] = {
                "type": name,
                "bits": FORMATS_BY_NAME[name].bits_per_value,
                "kernels": engine.info.kernels,
                "peer": f"llama.cpp {peer.version}",
                "configuration": peer.configurations[0],
            }
            for kind in ("decode", "prefill"):
                ours, theirs = rates["ours", kind].figures(), rates["theirs", kind].figures()
                row[kind] = {
                    "ours": ours,
                    "theirs": theirs,
                    "ratio": ours["tok_s"] / theirs["tok_s"],
                    "best_ratio": ours["best"] / theirs["best"],
                }
            return row
    finally:
        engine.close()


def pair(files: dict[str, Path], given: argparse.Namespace) -> dict[str, Any]:
    """Measure two files alternately, by wall-clock time and by CPU time."""
    engines = {name: load(file, given.threads) for name, file in files.items()}
    try:
        meters = {name: EngineMeter(engine, 1) for name, engine in engines.items()}
        rates = {name: Rate(1) for name in files}
        processor = {name: Rate(1) for name in files}
        for number in range(given.rounds + 1):
            for name, meter in meters.items():
                before = processor_time(os.getpid())
                meter.measure(("decode", 1, 0))
                between = processor_time(os.getpid())
                steps = meter.measure(("decode", DECODED + 1, 0))
                spent = processor_time(os.getpid()) - between - (between - before)
                if number:  # the first round warms up caches and pages
                    rates[name].steps += steps
                    processor[name].steps.append(spent / DECODED)
        found = {name: rate.figures() | {"bytes": files[name].stat().st_size} for name, rate in rates.items()}
        first, second = found.values()
        cost, other_cost = (rate.figures() for rate in processor.values())
        return {
            "layers": given.layers,
            "vocab": given.vocab,
            "threads": next(iter(engines.values())).info.threads,
            "decode": found,
            "ratio": first["tok_s"] / second["tok_s"],
            "best_ratio": first["best"] / second["best"],
            "processor_ratio": cost["tok_s"] / other_cost["tok_s"],
        }
    finally:
        for engine in engines.values():
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    parser.add_argument("--pair", nargs=2, metavar="FORMATS", help="two types, or `official` for the Q4_K_M mix")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--load", default="Nothing else was running.", help="a sentence about other load on the machine"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    stolen = StolenTime()
    kept: dict[str, Any] = {"block_types": []}
    if given.out is not None and given.out.exists():
        kept = json.loads(given.out.read_text())
    with TemporaryDirectory() as folder:
        if given.pair:
            files = {name: Path(folder, f"{name}.gguf") for name in given.pair}
            for name, file in files.items():
                write_synthetic(file, layers=given.layers, vocab=given.vocab, formats=name)
            kept["pair"] = pair(files, given)
            print(json.dumps(kept["pair"]), flush=True)
            save(kept, given, stolen)
        for name in () if given.pair else given.types:
            file = Path(folder, "random.gguf")
            write_synthetic(file, layers=given.layers, vocab=given.vocab, formats=name)
            row = beside_peer(name, file, given)
            print(json.dumps(row), flush=True)
            kept["block_types"] = [old for old in kept["block_types"] if old["type"] != name] + [row]
            save(kept, given, stolen)


def save(kept: dict[str, Any], given: argparse.Namespace, stolen: StolenTime) -> None:
    """Write the results; called after each measurement, so that none is lost."""
    if given.out is None:
        return
    kept["machine"] = describe_machine() | {"stolen_percent": stolen.percent()}
    if not given.pair:
        kept |= {"layers": given.layers, "prompt": given.prompt, "rounds": given.rounds, "load": given.load}
        kept["vocab"] = given.vocab
    given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
