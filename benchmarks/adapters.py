"""Measure the cost of LoRA adapters in decode steps, relative to the model alone.

    python benchmarks/adapters.py --layers 12

The model has random weights in SmolLM3-3B's shapes (fewer layers give the same ratios), and the adapters have random
float16 values for all seven matrices of a layer. Each round measures every combination of adapters once. Prints the
median time between tokens of each combination as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from notso import Engine, __version__
from notso.qtensor import F16, GGUFFile, GGUFWriter, QTensor
from notso.smollm3 import RequestOptions
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.diagnostics.benchmark import SHORT_TOKENS, EngineMeter, GenerationWatch, StolenTime, describe_machine
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.model.weights import TENSOR_NAMES, matrix_shapes

RANKS = (8, 16, 64)
SEEN_TOKENS = 4  # number of steps to exclude at the beginning of an answer
MIXES: dict[str, tuple[str | None, ...]] = {
    "model alone": (None,),
    **{f"rank {rank}": (f"r{rank}",) for rank in RANKS},
    "four answers, model alone": (None,) * 4,
    "four answers, one adapter of rank 16": ("r16",) * 4,
    "four answers, none and three adapters": (None, "r8", "r16", "r64"),
}


def write_adapter(path: Path, config: SmolLM3Config, rank: int) -> None:
    random = np.random.default_rng(rank)
    with GGUFWriter(path, durable=False) as writer:
        for key, text in (("general.type", "adapter"), ("general.architecture", "smollm3"), ("adapter.type", "lora")):
            writer.add(key, text, "string")
        writer.add("adapter.lora.alpha", float(rank), "float32")
        for role, (outputs, inputs) in matrix_shapes(config).items():
            for part, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                halves = QTensor.quantize(random.normal(0, 0.01, shape).astype(np.float32), F16).data
                for layer in range(config.num_hidden_layers):
                    writer.add_tensor(f"blk.{layer}.{TENSOR_NAMES[role]}.weight.lora_{part}", shape, F16, [halves])


def step_ms(meter: EngineMeter, engine: Engine, names: tuple[str | None, ...], tokens: int) -> float:
    """Return the median milliseconds between tokens of answers that are generated concurrently."""
    options = [RequestOptions(adapter=name) for name in names]
    # Submit all requests between two steps, so that they start in the same step.
    watches = engine._core.call(
        lambda: [
            GenerationWatch(engine.submit(meter.random_ids(SHORT_TOKENS), meter.params(max_tokens=tokens), each))
            for each in options
        ]
    )
    for watch in watches:
        watch.finish()
    return 1000 * statistics.median(step for watch in watches for step in watch.steps[SEEN_TOKENS:])


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    stolen = StolenTime()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_synthetic(model, layers=options.layers)
        with GGUFFile.open(model) as file:
            config = SmolLM3Config.from_metadata(file.metadata)
        given = []
        for rank in RANKS:
            write_adapter(Path(folder) / f"r{rank}.gguf", config, rank)
            given.append(f"r{rank}={folder}/r{rank}.gguf")
        seen: dict[str, list[float]] = {name: [] for name in MIXES}
        with Engine.load(model, context_tokens=512, adapters=tuple(given)) as engine:
            meter = EngineMeter(engine, 1)
            for _ in range(options.rounds):
                for name, mix in MIXES.items():
                    seen[name].append(step_ms(meter, engine, mix, options.tokens))
    steps = {name: statistics.median(each) for name, each in seen.items()}
    alone = {1: steps["model alone"], 4: steps["four answers, model alone"]}
    rows = {name: {"step_ms": steps[name], "of_alone": steps[name] / alone[len(mix)]} for name, mix in MIXES.items()}
    about = {"layers": options.layers, "rounds": options.rounds, "version": __version__}
    machine = describe_machine() | {"stolen_percent": round(stolen.percent(), 2)}
    print(json.dumps(about | {"machine": machine, "steps": rows}, indent=1))


if __name__ == "__main__":
    main()
