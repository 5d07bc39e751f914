"""Regenerate golden files in this folder, after changes to demo.gguf, a random model or the prompts.

    python tests/golden/make_goldens.py [NAME ...]

Run it in the project's environment. transformers (with torch and gguf) and llama-cpp-python must be installed there, or
in the Python that NOTSO_ORACLE_PYTHON names. It takes a minute. For names, see `GOLDENS` below (default: all).
llama.cpp's arithmetic depends on the machine; the committed files were created with AVX-512.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import live
from golden.adapters import CONVERTED, golden_pairs, write_peft
from golden.dequantized import write_dequantized
from golden.prompts import CONVERSATIONS, DATE
from golden.random_models import RANDOM, YARN_CONTEXT, shapes_3b_lists, write_shapes_3b
from golden.store import FOLDER, Golden, sha256, weights_sha256

from notso import Engine, RequestOptions
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weights import MATRICES

GREEDY_TOKENS = 64
ROPE = "rope_of_the_3b"
"""The rotation frequencies of the released configuration, with and without YaRN; this file contains no logits."""


def random_f32(folder: Path) -> Golden:
    """Random weights in F32, by transformers: 20 prompts and their greedy continuations."""
    model = RANDOM.write(folder / "random.gguf")
    prompts = RANDOM.prompts(20, 100)
    result = live.ask("transformers", model, prompts, f"--greedy={GREEDY_TOKENS}")
    return _golden("transformers", model, prompts, result, _some(result.lists, 12))


def random_half_cache(folder: Path) -> Golden:
    """The same with keys and values rounded to half precision, as in our cache; the first position of every list."""
    model = RANDOM.write(folder / "random.gguf")
    prompts = [prompt[:2] for prompt in RANDOM.prompts(20, 100)]
    result = live.ask("transformers", model, prompts, "--half-cache")
    starts = np.cumsum([0, *map(len, prompts[:-1])]).tolist()
    return _golden("transformers", model, prompts, result, starts[:8])


def random_yarn(folder: Path) -> Golden:
    """The same weights with a shorter trained context, which YaRN doubles."""
    model = RANDOM.write(folder / "yarn.gguf", context=YARN_CONTEXT)
    prompts = [RANDOM.prompts(20, 2 * YARN_CONTEXT)[-1]]
    result = live.ask("transformers", model, prompts, f"--yarn-trained={YARN_CONTEXT}")
    return _golden("transformers", model, prompts, result, [1, YARN_CONTEXT, 2 * YARN_CONTEXT - 1])


def random_adapter(folder: Path) -> Golden:
    """The model of `random_f32` with a LoRA adapter, by PEFT."""
    model = RANDOM.write(folder / "random.gguf")
    adapter = write_peft(folder / "adapter", golden_pairs(model), RANDOM.head_dim, target_modules=list(MATRICES))
    prompts = RANDOM.prompts(20, 100)
    result = live.ask("transformers", model, prompts, f"--greedy={GREEDY_TOKENS}", f"--adapter={adapter}")
    return _golden("peft", model, prompts, result, _some(result.lists, 12))


def demo_f32(folder: Path) -> Golden:
    """The demo model's dequantized weights, by transformers: 20 chats, each with 64 greedy tokens."""
    model = write_dequantized(demo_path(), folder / "demo-f32.gguf")
    prompts = demo_prompts()
    result = live.ask("transformers", model, prompts, f"--greedy={GREEDY_TOKENS}")
    return _golden("transformers", demo_path(), prompts, result, _some(result.lists, 10))


def demo_q4_k_m(folder: Path) -> Golden:
    """The demo model as shipped, by llama.cpp: the same chats, with the greedy answers of `demo_f32`."""
    prompts = demo_prompts()
    answered = _answered(prompts, folder)
    with Engine.load(kv="f16") as engine:
        ends = engine.tokenizer.end_ids
    lists = [_until_end(ids, len(prompt), ends) for ids, prompt in zip(answered, prompts, strict=True)]
    result = live.ask("llama_cpp", demo_path(), lists)
    noise = live.ask("llama_cpp", demo_path(), lists, "--one-by-one")
    return _golden("llama_cpp", demo_path(), prompts, result, [], noise)


def converted_adapter(folder: Path) -> Golden:
    """The demo model with `converted_adapter.gguf`, which was created by llama.cpp's converter, by llama.cpp: the chats
    of `demo_q4_k_m`."""
    kept = Golden.load("demo_q4_k_m")
    adapter = f"--adapter={CONVERTED}"
    result = live.ask("llama_cpp", demo_path(), kept.lists, adapter)
    noise = live.ask("llama_cpp", demo_path(), kept.lists, adapter, "--one-by-one")
    return _golden("llama_cpp", demo_path(), kept.lists, result, [], noise)


def shapes_3b(folder: Path) -> Golden:
    """Random blocks in the shapes and formats of the 3B, with 4 layers, by llama.cpp."""
    model = write_shapes_3b(folder / "shapes.gguf")
    lists = shapes_3b_lists()
    result = live.ask("llama_cpp", model, lists)
    noise = live.ask("llama_cpp", model, lists, "--one-by-one")
    return _golden("llama_cpp", model, lists, result, [], noise)


GOLDENS: dict[str, Callable[[Path], Golden]] = {
    maker.__name__: maker
    for maker in (
        *(random_f32, random_half_cache, random_yarn, random_adapter),
        *(demo_f32, demo_q4_k_m, converted_adapter, shapes_3b),
    )
}
LIBRARIES = {
    "random_adapter": "peft",
    "demo_q4_k_m": "llama_cpp",
    "converted_adapter": "llama_cpp",
    "shapes_3b": "llama_cpp",
}
"""Library that computes a golden file, if not transformers."""


def demo_prompts() -> list[list[int]]:
    with Engine.load(kv="f16") as engine:
        return [
            engine.encode_chat(c.messages, RequestOptions(thinking=c.thinking, tools=c.tools or None, date=DATE))
            for c in CONVERSATIONS
        ]


def _golden(
    library: str,
    model: Path,
    prompts: list[list[int]],
    result: live.OracleLogits,
    rows: list[int],
    noise: live.OracleLogits | None = None,
) -> Golden:
    source = live.versions(library) or library
    sha = sha256(model) if model == demo_path() else weights_sha256(model)
    return Golden.of(source, sha, prompts, result.lists, result.logits, rows, None if noise is None else noise.logits)


def _some(lists: list[list[int]], count: int) -> list[int]:
    """Return positions spread over all lists, including the very first and the very last."""
    return np.linspace(0, sum(map(len, lists)) - 1, count).astype(int).tolist()


def _answered(prompts: list[list[int]], folder: Path) -> list[list[int]]:
    """Return the chats with their greedy answers, from `demo_f32.npz` if that belongs to this demo model."""
    if (FOLDER / "demo_f32.npz").is_file():
        kept = Golden.load("demo_f32")
        asked = [ids[:length] for ids, length in zip(kept.lists, kept.prompt_lengths.tolist(), strict=True)]
        if kept.model_sha256 == sha256(demo_path()) and asked == prompts:
            return kept.lists
    model = write_dequantized(demo_path(), folder / "demo-f32.gguf")
    return live.ask("transformers", model, prompts, f"--greedy={GREEDY_TOKENS}").lists


def _until_end(ids: list[int], prompt_length: int, ends: frozenset[int]) -> list[int]:
    for at in range(prompt_length, len(ids)):
        if ids[at] in ends:
            return ids[: at + 1]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Regenerate the golden files.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*GOLDENS, ROPE])}; all by default")
    names = parser.parse_args().names or [*GOLDENS, ROPE]
    if unknown := set(names) - {*GOLDENS, ROPE}:
        parser.error(f"no golden is called {', '.join(sorted(unknown))}")
    for library in sorted({LIBRARIES.get(name, "transformers") for name in names}):
        if live.versions(library) is None:
            parser.error(live.why_missing(library))
    for name in names:
        started = time.perf_counter()
        if name == ROPE:
            np.savez(FOLDER / f"{ROPE}.npz", **live.rope_of_the_3b())
            print(f"{ROPE}.npz: {live.versions('transformers')}")
            continue
        with TemporaryDirectory() as folder:
            golden = GOLDENS[name](Path(folder))
        path = golden.save(name)
        print(
            f"{path.name}: {path.stat().st_size:,} bytes, {len(golden.lists)} lists, {len(golden.ids)} positions, "
            f"range {golden.logit_range:.2f}, {golden.source}, model {golden.model_sha256[:12]}, "
            f"{time.perf_counter() - started:.0f} s"
            + (f"; agrees with itself: {golden.noise_top1:.4f} top-1" if golden.noise_top1 else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
