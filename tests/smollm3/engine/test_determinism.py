"""Results are the same bit for bit, whatever kernels compute them and however the work is split."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from golden.random_models import RANDOM, write_random_blocks, write_shapes_3b
from golden.store import Floats

from notso.qtensor import CPU
from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.gguf import GGUFFile
from notso.smollm3 import Engine, Event, SamplingParams
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.model.transformer import SmolLM3
from notso.smollm3.model.weights import SmolLM3Weights

LENGTH = 135
"""Beyond a tile boundary (128 positions), and not a multiple of a block or step size."""

Cut = Callable[[int], list[int]]

CUTS: dict[str, Cut] = {
    "whole": lambda length: [0, length],
    "one by one": lambda length: [*range(length + 1)],
    "by 7": lambda length: [*range(0, length, 7), length],
    "by 64": lambda length: [*range(0, length, 64), length],
    "unevenly": lambda length: [0, 1, 3, length - 23, length - 21, length],
}


@contextmanager
def loaded(path: Path, capacity: int) -> Iterator[SmolLM3]:
    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        yield SmolLM3(config, SmolLM3Weights.from_tensors(file.tensors, config), KVCache(CPU(), config, capacity))


def logits_in_pieces(model: SmolLM3, ids: list[int], cut: Cut) -> Floats:
    """Return the logits (L, V) of a prompt that is prefilled in the pieces of `cut`."""
    parts = []
    for start, end in pairwise(cut(len(ids))):
        step = InputBatch(model.backend, model.config, end - start, end - start)
        step.fill(ids[start:end], range(start, end), [0] * (end - start), range(end - start))
        model.forward(step)
        parts.append(step.logits)
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model file, token ids, and logits of the generic kernels with one thread in a single step."""

    path: Path
    ids: list[int]
    expected: Floats


@pytest.fixture(scope="module", params=["floats", "blocks", "demo"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Write small files, because generic kernels are slow: F32, random Q4_K_M weights, and a trained model."""
    path, length = tmp_path_factory.mktemp("case") / "model.gguf", LENGTH
    if request.param == "floats":
        replace(RANDOM, hidden=128, ffn=192, heads=4, head_dim=32, vocab=301, layers=4).write(path)
    elif request.param == "blocks":
        write_random_blocks(path, layers=4, hidden=256, ffn=512, heads=4, kv_heads=1, vocab=301)
    else:
        path, length = demo_path(), 33
    ids = [token % 301 for token in RANDOM.prompts(20, length)[-1]]
    kernels, threads = kernel_choice.kernels(), kernel_choice.threads()
    kernel_choice.use_kernels("generic")
    kernel_choice.set_threads(1)
    with loaded(path, length) as model:
        expected = logits_in_pieces(model, ids, CUTS["whole"])
    kernel_choice.use_kernels(kernels)
    kernel_choice.set_threads(threads)
    assert np.isfinite(expected).all()
    assert len(set(expected.argmax(1).tolist())) > 5
    return Case(path, ids, expected)


@pytest.mark.parametrize("kernels", kernel_choice.available_kernels())
def test_logits_are_bit_identical_across_kernels_threads_and_chunks(
    case: Case, own_kernels: None, kernels: str
) -> None:
    """Every family with 1, 2 and 3 threads; the prompt in one step, token by token, and in pieces."""
    kernel_choice.use_kernels(kernels)
    with loaded(case.path, LENGTH) as model:
        for threads in (1, 2, 3):
            kernel_choice.set_threads(threads)
            for name in {1: ("whole", "one by one"), 2: CUTS, 3: ("whole",)}[threads]:
                logits = logits_in_pieces(model, case.ids, CUTS[name])
                np.testing.assert_array_equal(logits, case.expected, err_msg=f"{name}, {threads} threads")


@pytest.mark.parametrize("kernels", kernel_choice.available_kernels())
def test_recorded_decode_step_matches_prefill_logits(case: Case, own_kernels: None, kernels: str) -> None:
    """The program that the engine decodes with is replayed with every family."""
    kernel_choice.use_kernels(kernels)
    kernel_choice.set_threads(2)
    start = len(case.ids) - 25  # for long prompts, before a tile boundary
    with loaded(case.path, LENGTH) as model:
        step = InputBatch(model.backend, model.config, rows=1, sampled=1)
        program = ops.Program()
        with program.record():
            model.forward(step)
        logits_in_pieces(model, case.ids[:start], CUTS["whole"])
        for at in range(start, len(case.ids)):
            step.fill([case.ids[at]], [at], [0], [0])
            program.run()
            np.testing.assert_array_equal(step.logits[0], case.expected[at])


def test_logits_of_3b_shapes_are_identical_across_kernels(tmp_path: Path, own_kernels: None) -> None:
    """Rows of 2,048 and 11,008 values in Q4_K and Q6_K; only a few tokens, because generic kernels are slow."""
    path = write_shapes_3b(tmp_path / "shapes.gguf")
    ids = [5, 1000, 4095, 7, 7]
    results = {}
    for kernels in kernel_choice.available_kernels():
        kernel_choice.use_kernels(kernels)
        kernel_choice.set_threads(2)
        with loaded(path, 8) as model:
            few = ids if kernels != "generic" else ids[:2]
            results[kernels] = logits_in_pieces(model, few, CUTS["whole"])
            np.testing.assert_array_equal(logits_in_pieces(model, few[:2], CUTS["one by one"]), results[kernels][:2])
    best = results[kernel_choice.available_kernels()[0]]
    assert np.isfinite(best).all()
    for kernels, logits in results.items():
        np.testing.assert_array_equal(logits, best[: len(logits)], err_msg=kernels)


# ---------------------------------------------------------------- the engine


def texts(events: Iterator[Event]) -> list[Event]:
    """Yield the events without times and without progress before the first token."""
    return [event for event in events if event.kind not in ("usage", "queued", "progress")]


def forget(engine: Engine) -> None:
    """Empty the prefix cache."""
    engine._core.call(engine._pool.clear)


SAMPLED = SamplingParams(max_tokens=24, temperature=1.5, top_p=1.0, seed=11)


@pytest.mark.parametrize("rows", [1, 7, 64, 256])
def test_prefill_step_size_does_not_change_results(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    prompt = RANDOM.prompts(20, 90)[-1]
    expected = demo_engine.logits(prompt), texts(demo_engine.generate(prompt, SAMPLED))
    monkeypatch.setattr(demo_engine._runner, "max_rows", rows)
    np.testing.assert_array_equal(demo_engine.logits(prompt), expected[0])
    assert texts(demo_engine.generate(prompt, SAMPLED)) == expected[1]


def test_cached_prefix_does_not_change_answers(demo_engine: Engine) -> None:
    """A prompt is answered with an empty cache, and after itself, its beginning, a diverging and a longer prompt."""
    prompt = RANDOM.prompts(20, 90)[-1]

    def answer(before: list[int]) -> tuple[list[Event], int]:
        forget(demo_engine)
        if before:
            list(demo_engine.generate(before, SAMPLED))
        events = list(demo_engine.generate(prompt, SAMPLED))
        assert events[-2].usage is not None
        return texts(iter(events)), events[-2].usage.cached_tokens

    cold, cached = answer([])
    assert cached == 0
    for before, reused in (
        (prompt, len(prompt) - 1),
        (prompt[:50], 50),
        ([*prompt[:30], (prompt[30] + 1) % RANDOM.vocab], 30),
        ([*prompt, 3, 4, 5], len(prompt) - 1),
    ):
        events, cached = answer(before)
        assert events == cold
        assert reused <= cached < len(prompt)


def test_second_turn_with_cached_answer_matches_full_prefill(demo_engine: Engine) -> None:
    """A second turn reuses the first one's answer, with the logits of a complete prefill."""
    prompt = RANDOM.prompts(20, 60)[-1]
    forget(demo_engine)
    first = list(demo_engine.generate(prompt, SAMPLED))
    longer = [*prompt, *range(200, 230)]
    warm = texts(demo_engine.generate(longer, SAMPLED))
    forget(demo_engine)
    assert texts(demo_engine.generate(longer, SAMPLED)) == warm
    forget(demo_engine)
    assert texts(demo_engine.generate(prompt, SAMPLED)) == texts(iter(first))


def test_concurrent_answers_equal_sequential_answers(demo_engine: Engine) -> None:
    prompts = RANDOM.prompts(4, 40)
    alone = [texts(demo_engine.generate(prompt, SAMPLED)) for prompt in prompts]
    together: dict[int, list[Event]] = {}

    def ask(number: int) -> None:
        together[number] = texts(demo_engine.generate(prompts[number], SAMPLED))

    workers = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [together[number] for number in range(len(prompts))] == alone


@pytest.mark.parametrize("kernels", kernel_choice.available_kernels())
def test_sampled_answers_are_identical_across_kernels(case: Case, own_kernels: None, kernels: str) -> None:
    """Sampling with temperature and seed, as in normal use of the engine."""
    prompt = case.ids[:30]
    results = []
    for choice in (kernels, "generic"):
        with Engine.load(case.path, context_tokens=64, threads=2) as one:
            kernel_choice.use_kernels(choice)
            results.append(texts(one.generate(prompt, SAMPLED)))
    assert results[0] == results[1]
    assert len({event.text for event in results[0]}) > 5
