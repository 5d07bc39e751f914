"""Measure how each format of the KV cache changes the demo model's predictions, and its size.

    python benchmarks/kv_quality.py --out benchmarks/results/kv-quality.json
    python benchmarks/kv_quality.py --weights --out benchmarks/results/kv-by-weights.json

The texts are greedy answers of the demo model in long conversations, each evaluated with the preceding conversation as
context. Answers that begin before position 256 are excluded, because every format stores those positions in 8 bits.
Three figures compare a format with a half-precision cache: the share of positions with the same most likely token, the
mean KL divergence in nats, and the perplexity of the text. `--weights` compares the error of the cache with the error
of quantized weights, on random weights.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from notso import __version__
from notso.smollm3 import Engine, Message, RequestOptions, SamplingParams
from notso.smollm3.conversion.quantizer import quantize
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.engine.memory_plan import kv_bytes_per_token
from notso.smollm3.kv.kv_cache import KV_FORMATS
from notso.smollm3.sampling.sampler import log_probabilities

FINE_TOKENS = 256
GENERATION_TOKENS = 100
EVERY = 3  # evaluate every third turn, to save time
CONTEXT = 2048
ASKED = (
    "What is {} + {}?",
    "What is {} - {}?",
    "Count from {} to {}.",
    "What is SmolLM3?",
    "Who are you?",
    "What is NoPE?",
    "How many layers does SmolLM3 have?",
    "Tell me a joke.",
)
Doubles = npt.NDArray[np.float64]


def conversation(engine: Engine, seed: int) -> list[tuple[list[int], int]]:
    """Return the turns of a long conversation: all ids up to an answer's end, and the position at which it begins."""
    source = random.Random(seed)
    messages: list[Message] = []
    turns: list[tuple[list[int], int]] = []
    while True:
        question = source.choice(ASKED).format(*source.sample(range(2, 30), 2))
        messages.append(Message("user", question))
        prompt = engine.encode_chat(messages, RequestOptions(thinking=False))
        if len(prompt) + GENERATION_TOKENS > CONTEXT:
            return turns
        events = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=GENERATION_TOKENS))
        said = "".join(event.text for event in events if event.kind == "text")
        messages.append(Message("assistant", said))
        if len(prompt) >= FINE_TOKENS:
            turns.append(([*prompt, *engine.tokenizer.encode(said)], len(prompt)))


def by_weights() -> dict[str, Any]:
    """Measure random weights, float and quantized, with each cache format that `--kv auto` chooses from."""
    shape = {"layers": 12, "hidden": 1024, "ffn": 2816, "heads": 8, "kv_heads": 2, "vocab": 8192}
    ids = np.random.default_rng(0).integers(0, shape["vocab"] // 2, 1024).tolist()
    rows: list[dict[str, Any]] = []
    exact: Doubles | None = None
    with TemporaryDirectory() as folder:
        floats = Path(folder, "F16.gguf")
        write_synthetic(floats, **shape, formats="F16", seed=1)
        for name in ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"):
            path = Path(folder, f"{name}.gguf")
            if path != floats:
                quantize(floats, path, name)
            row: dict[str, Any] = {"weights": name}
            for kv in ("f16", "k8v8", "auto"):
                with Engine.load(path, context_tokens=CONTEXT, kv=kv) as engine:
                    row["auto"] = engine.info.kv_format
                    if kv == "auto":
                        continue
                    q = log_probabilities(engine.logits(ids)[FINE_TOKENS:]).astype(np.float64)
                exact = q if exact is None else exact
                row[kv] = float(f"{(np.exp(exact) * (exact - q)).sum(-1).mean():.3g}")
            rows.append(row)
            print(row)
    text = ", ".join(f"{name} {value}" for name, value in shape.items())
    return {"shape": text, "positions": len(ids) - FINE_TOKENS, "kv_by_weights": rows}


def kept(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"version": __version__, **result}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--weights", action="store_true")
    given = parser.parse_args()

    if given.weights:
        kept(by_weights(), given.out)
        return
    with Engine.load(context_tokens=CONTEXT, kv="f16") as engine:
        turns = [turn for seed in range(given.conversations) for turn in conversation(engine, seed)[::EVERY]]
    following = np.concatenate([np.array(ids[start:], np.int64) for ids, start in turns])
    rows: list[dict[str, Any]] = []
    exact: Doubles | None = None
    for kv in KV_FORMATS:
        with Engine.load(context_tokens=CONTEXT, kv=kv) as engine:
            found = [log_probabilities(engine.logits(ids)[start - 1 : -1]) for ids, start in turns]
            bits = 8 * kv_bytes_per_token(engine.config, kv) / engine.config.kv_values_per_token
        q = np.concatenate(found).astype(np.float64)
        p = exact = q if exact is None else exact
        perplexity = float(np.exp(-np.take_along_axis(q, following[:, None], 1).mean()))
        rows.append(
            {
                "format": kv,
                "bits": round(bits, 3),
                "positions": len(p),
                "top1": round(float((p.argmax(-1) == q.argmax(-1)).mean()), 5),
                "divergence": float(f"{(np.exp(p) * (p - q)).sum(-1).mean():.3g}"),
                "perplexity": round(perplexity, 4),
            }
        )
        print(rows[-1])
    kept({"model": "demo", "context": CONTEXT, "formats": rows}, given.out)


if __name__ == "__main__":
    main()
