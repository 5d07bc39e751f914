"""Each block type's decode and prompt beside llama.cpp's, and IQ4_XS beside the Q4_K_M mix.

    python benchmarks/block_types.py [TYPE ...] [--layers 4] [--rounds 5] [--out benchmarks/results/block-types.json]
    python benchmarks/block_types.py --pair IQ4_XS official --layers 36

Random weights in the 3B's shapes, of few layers, with all matrices in the type. Both engines are loaded beside each
other and measured in turns, on one thread each and by the processor time that their process takes, so that other work
on the machine matters little; llama.cpp by its defaults, weights repacked where it can (NOTSO_PEER_PYTHON names its
Python). Rates are of the median round. --pair measures two of our own files in turns. What is kept
already in --out stays, if its type is not measured anew.
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
    """An engine as it is benchmarked: no guessing ahead, weights in large pages."""
    return Engine.load(
        file, context_tokens=CONTEXT, threads=threads, weights="packed", max_num_seqs=1, speculation=False
    )


class Rate:
    """Seconds of steps, each of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.steps: list[float] = []

    def figures(self) -> dict[str, float]:
        """Tokens per second of the median step and of the least."""
        return {"tok_s": self.tokens / statistics.median(self.steps), "best": self.tokens / min(self.steps)}


def processor_time(pid: int) -> float:
    """Seconds that all threads of a process have run."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid(3) makes of it


def beside_peer(name: str, file: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One type's row. Decoding is what more tokens take beyond the first, so that no prompt is in it."""
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
                    if number:  # the first turn finds caches and pages cold
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
    """Two of our own files, in turns: by the clock, and by processor time, which on one thread is what a step costs."""
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
                if number:  # the first turn finds caches and pages cold
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
    parser.add_argument("--pair", nargs=2, metavar="FORMATS", help="types, or `official` for the Q4_K_M mix")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--load", default="Nothing else was running.", help="what else the machine did, in a sentence")
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
    """After each measurement, so that none is lost."""
    if given.out is None:
        return
    kept["machine"] = describe_machine() | {"stolen_percent": stolen.percent()}
    if not given.pair:
        kept |= {"layers": given.layers, "prompt": given.prompt, "rounds": given.rounds, "load": given.load}
        kept["vocab"] = given.vocab
    given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
