"""Check that a GPU gives the same bits as the CPU: every kernel with random data, and with --model, complete answers.

    python benchmarks/cuda_bits.py [--device cuda:0] [--small] [--model FILE.gguf] [--json OUT]

The exit code is 1 if anything differs. --small is for the sanitizer, which slows kernels down a thousandfold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from notso.qtensor import CPU, CUDA, FORMATS_BY_NAME, differing_operations
from notso.smollm3 import Engine, SamplingParams

SMALL = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q5_1", "IQ3_XXS")
"""Formats for the sanitizer: three with dedicated kernels, and three for variants of the kernels for many formats."""
POSITIONS, ANSWER_TOKENS, ROUNDS = 64, 200, 3
CONTEXT_TOKENS = 1024


def kernels(device: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the names of operations with different results."""
    gpu = CUDA(int(device.partition(":")[2] or 0))
    found = differing_operations(gpu, CPU.configured(), [FORMATS_BY_NAME[name] for name in names])
    return {"device": gpu.name, "kernels": gpu.kernels, "formats": names, "differ": found}


def answers(device: str, model: Path | None) -> dict[str, Any]:
    """Compare logits at some positions, a greedy answer and some seeded answers on both devices."""
    differ, text = list[str](), dict[str, list[str]]()
    logits, ids = dict[str, Any](), np.random.default_rng(4).integers(100, 3000, POSITIONS).tolist()
    for name in ("cpu", device):
        with Engine.load(model, device=name, context_tokens=CONTEXT_TOKENS) as engine:
            logits[name] = engine.logits(ids)
            chosen = [SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)]
            chosen += [SamplingParams(max_tokens=ANSWER_TOKENS, seed=seed) for seed in range(ROUNDS)]
            running = [engine.submit(ids[: 16 + 8 * number], each) for number, each in enumerate(chosen)]
            text[name] = ["".join(event.text for event in each.events()) for each in running]
    if logits["cpu"].tobytes() != logits[device].tobytes():
        differ.append("logits")
    differ += [f"answer {n}" for n, (a, b) in enumerate(zip(text["cpu"], text[device], strict=True)) if a != b]
    characters = sum(map(len, text["cpu"]))
    return {"device": device, "positions": POSITIONS, "characters": characters, "differ": differ}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if asked.model is not None:
        result = answers(asked.device, asked.model)
    else:
        result = kernels(asked.device, SMALL if asked.small else tuple(FORMATS_BY_NAME))
    print(json.dumps(result))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result) + "\n")
    return 1 if result["differ"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
