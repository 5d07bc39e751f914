"""Measure llama.cpp's quantizer on the reordered demo model: perplexity, and errors of the weights.

    python tests/golden/quantized.py        regenerate quantized.json; requires llama-cpp-python as in make_goldens.py

Our engine reads both models. Perplexity covers answers in conversations that were not used in training. The importance
of inputs is measured on other conversations, as text whose control tokens are spelled out.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from golden import live
from golden.reordered import write_reordered

from notso import Engine
from notso.qtensor import GGUFFile
from notso.smollm3.conversion.importance import Importance, importance
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weights import FILE_TYPES
from training.corpus import sample

FILE = Path(__file__).with_name("quantized.json")
SEED = 20_261_125  # not a seed of the training
JUDGED, JUDGED_TOKENS = 24, 400
"""Number of evaluated conversations, and of tokens read from each."""

READ_CHARACTERS = 40_000


@dataclass(frozen=True, slots=True)
class Figures:
    """perplexity: of the answers' tokens. error: the sum of squared errors of all weights, weighted by the importance
    of their columns, relative to the same sum for the weights themselves."""

    perplexity: float
    error: float


def text() -> str:
    """Return the conversations for measuring the importance of inputs."""
    random, read = Random(SEED + 1), ""
    while len(read) < READ_CHARACTERS:
        read += sample(random)[0]
    return read


def measured(model: Path) -> Importance:
    """Return the importance of inputs, measured on `text()`."""
    with GGUFFile.open(model) as file:
        return importance(file, text(), 1, lambda done, total: None)


def perplexity(path: Path) -> float:
    """Return the perplexity of the assistant's text in the evaluated conversations."""
    random, nats = Random(SEED), []
    with Engine.load(path, context_tokens=512, kv="f16", threads=1) as engine:
        for _ in range(JUDGED):
            said, spans = sample(random)
            ids = engine.tokenize(said, special=True)[:JUDGED_TOKENS]
            logits = engine.logits(ids).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            for begin, end in spans:
                first, last = (len(engine.tokenize(said[:at], special=True)) for at in (begin, end))
                places = np.arange(first, min(last, len(ids)))
                own = logits[places - 1, np.array(ids)[places]]
                nats.append(np.log(np.exp(logits[places - 1]).sum(axis=1)) - own)
    return math.exp(float(np.concatenate(nats).mean()))


def figures(made: Path, model: Path, known: Importance) -> Figures:
    """Return the figures of a quantized file. `model`: the file with the original floats."""
    return Figures(perplexity(made), weight_error(made, model, known))


def weight_error(made: Path, model: Path, known: Importance) -> float:
    wrong = whole = 0.0
    with GGUFFile.open(made) as ours, GGUFFile.open(model) as floats:
        for name, columns in known.of.items():
            exact = floats.tensors[name].dequantize()
            wrong += float((columns * np.square(ours.tensors[name].dequantize() - exact)).sum(dtype=np.float64))
            whole += float((columns * np.square(exact)).sum(dtype=np.float64))
    return wrong / whole


def key(mix: str, important: bool) -> str:
    return f"{mix}, importance" if important else mix


def load() -> dict[str, Figures]:
    """Return llama.cpp's figures by `key`."""
    return {name: Figures(**value) for name, value in json.loads(FILE.read_text())["figures"].items()}


def main() -> None:
    found = {}
    with TemporaryDirectory() as folder:
        model = write_reordered(demo_path(), Path(folder, "f32.gguf"))
        found["F32"] = asdict(Figures(perplexity(model), 0.0))
        known = measured(model)
        for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
            for important in (False, True):
                out = Path(folder, "made.gguf")
                live.quantize(model, out, FILE_TYPES[mix], dict(known.of) if important else None)
                found[key(mix, important)] = asdict(figures(out, model, known))
    content = {"source": live.versions("llama_cpp"), "figures": found}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
