"""Each block type's decode and prompt beside llama.cpp's, and IQ4_XS beside the Q4_K_M mix.

    python benchmarks/block_types.py [TYPE ...] [--layers 4] [--rounds 5] [--out benchmarks/results/block-types.json]
    python benchmarks/block_types.py --pair IQ4_XS official --layers 36

Random weights in the 3B's shapes, of few layers, with all matrices in the type. Both engines are loaded beside each
other and measured in turns; llama.cpp in the fastest of its configurations (NOTSO_PEER_PYTHON names its Python). A
rate is that of the median step of all rounds; `best` is that of the least, which says more where other programs work.
--pair measures two of our own files in turns. What is kept already in --out stays, if its type is not measured anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from notso.qtensor.formats import FORMATS, FORMATS_BY_NAME
from notso.smollm3 import Engine
from notso.smollm3.diagnostics.engine_meter import EngineMeter
from notso.smollm3.diagnostics.machine import StolenTime, describe_machine
from notso.smollm3.diagnostics.peers import PeerProcess, Task
from notso.smollm3.diagnostics.synth import write_synthetic

TYPES = [format.name for format in FORMATS.values() if not format.is_float]
CONTEXT = 1024
DECODE: Task = ("decode", 16, 0)


def load(file: Path, threads: int | None) -> Engine:
    """An engine as it is benchmarked: no guessing ahead, weights in large pages."""
    return Engine.load(
        file, context_tokens=CONTEXT, threads=threads, weights="hugepages", max_num_seqs=1, speculation=False
    )


class Rate:
    """Seconds of steps, each of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.steps: list[float] = []

    def figures(self) -> dict[str, float]:
        """Tokens per second of the median step and of the least."""
        return {"tok_s": self.tokens / statistics.median(self.steps), "best": self.tokens / min(self.steps)}


def beside_peer(name: str, file: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One type's row."""
    prompt: Task = ("prefill", given.prompt, 0)
    tasks = {"decode": (DECODE, 1), "prefill": (prompt, given.prompt)}
    engine = load(file, given.threads)
    try:
        with PeerProcess("llama.cpp", file, CONTEXT, engine.info.threads) as peer:
            peer.tune([task for task, _ in tasks.values()])
            meter = EngineMeter(engine, 1)
            ours = {kind: Rate(tokens) for kind, (_, tokens) in tasks.items()}
            theirs = {kind: Rate(tokens) for kind, (_, tokens) in tasks.items()}
            for number in range(given.rounds):
                for kind, (task, _) in tasks.items():
                    turns = [(ours, meter.measure), (theirs, peer.measure)]
                    for rates, measure in turns if number % 2 == 0 else reversed(turns):
                        rates[kind].steps += measure(task)
            row: dict[str, Any] = {
                "type": name,
                "bits": FORMATS_BY_NAME[name].bits_per_value,
                "kernels": engine.info.kernels,
                "threads": engine.info.threads,
                "peer": f"llama.cpp {peer.version}",
            }
            for kind, (task, _) in tasks.items():
                found, other = ours[kind].figures(), theirs[kind].figures()
                row[kind] = {
                    "ours": found,
                    "theirs": other,
                    "ratio": found["tok_s"] / other["tok_s"],
                    "best_ratio": found["best"] / other["best"],
                    "configuration": peer.configuration(task),
                }
            return row
    finally:
        engine.close()


def pair(files: dict[str, Path], given: argparse.Namespace) -> dict[str, Any]:
    """Two of our own files, in turns."""
    engines = {name: load(file, given.threads) for name, file in files.items()}
    try:
        meters = {name: EngineMeter(engine, 1) for name, engine in engines.items()}
        rates = {name: Rate(1) for name in files}
        for number in range(given.rounds + 1):
            for name, meter in meters.items():
                steps = meter.measure(DECODE)
                if number:  # the first turn finds caches and pages cold
                    rates[name].steps += steps
        found = {name: rate.figures() | {"bytes": files[name].stat().st_size} for name, rate in rates.items()}
        first, second = found.values()
        return {
            "layers": given.layers,
            "decode": found,
            "ratio": first["tok_s"] / second["tok_s"],
            "best_ratio": first["best"] / second["best"],
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
                write_synthetic(file, layers=given.layers, formats=name)
            kept["pair"] = pair(files, given)
            print(json.dumps(kept["pair"]), flush=True)
            save(kept, given, stolen)
        for name in () if given.pair else given.types:
            file = Path(folder, "random.gguf")
            write_synthetic(file, layers=given.layers, formats=name)
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
    given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
