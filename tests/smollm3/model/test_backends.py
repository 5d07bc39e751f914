"""The model gives the same bits on two backends, so no code above the tensor layer depends on CPU memory or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from golden.random_models import RANDOM
from golden.store import Floats
from numpy_backend.backend import NumpyBackend, OpaqueArray
from smollm3.two_turns import until
from stub_gpu.gpu import emulated_gpu

from notso.qtensor import CPU, MIB, TILE_POSITIONS, Backend, GGUFFile, KVFormat
from notso.smollm3 import Engine, EngineConfig, OutOfMemoryError, SamplingParams
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.model_runner import ModelRunner
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.scheduling.sequence import BlockCopy, Chunk, Sequence

BACKENDS: list[Callable[[], Backend]] = [CPU, NumpyBackend, emulated_gpu]
BLOCKS = 6
LENGTHS = (TILE_POSITIONS + 10, 20, 9)
SHORT = ("k4v3",)
RNG = np.random.default_rng(7)


def long(*values: object) -> Any:
    """Mark a slow case that adds little to the others."""
    return pytest.param(*values, marks=pytest.mark.long("engine", "native"))


@contextmanager
def runner_of(path: Path, backend: Backend, kv_format: KVFormat) -> Iterator[ModelRunner]:
    """Create a runner for three sequences with separate blocks, and with a window for every block."""
    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        weights = SmolLM3Weights.from_tensors(file.tensors, config).to_device(backend)
        windows = {block: BLOCKS - 1 - block for block in range(BLOCKS)}
        cache = KVCache(
            backend,
            config,
            2 * TILE_POSITIONS,
            max_num_seqs=3,
            blocks=BLOCKS,
            kv_format=kv_format,
            window_blocks=BLOCKS,
            windows=windows,
        )
        yield ModelRunner(config, weights, cache, max_rows=256)


def chunk(sequence: Sequence, count: int, *, samples: bool = True) -> Chunk:
    start, sequence.computed = sequence.computed, sequence.computed + count
    return Chunk(sequence, start, count, [], samples)


def logits_of(runner: ModelRunner, tokens: list[list[int]]) -> list[Floats]:
    """Return logits of a prompt prefilled in two steps, one of them eager; of two other prompts; of a few recorded
    steps with all three; and with a block moved out and in again, and one copied for its sequence."""
    sequences = [Sequence(ids) for ids in tokens]
    for index, sequence in enumerate(sequences):
        sequence.batch_index, sequence.blocks = index, [index, index + 3]

    def run(*chunks: Chunk) -> list[Floats]:
        rows = runner.run(chunks, lambda _: True)
        assert rows is not None
        return [row.copy() for row in rows]

    first, second, third = sequences
    found = run(chunk(first, 100, samples=False))
    found += run(chunk(first, TILE_POSITIONS - 96), chunk(second, 14), chunk(third, 3))
    for _ in range(3):
        found += run(*(chunk(sequence, 1) for sequence in sequences))
    cache = runner.cache
    content, window = cache.read_block(1), cache.read_window(1)

    def read_into(memory: list[memoryview]) -> bool:
        at = 0
        for part in memory:
            part[:] = content[at : at + len(part)]
            at += len(part)
        return at == len(content)

    assert cache.load_block(5, read_into)
    if window is not None:
        cache.write_window(5, window)
        second.blocks = [5, 4]
    cache.copy_block(BlockCopy(2, 1, 3, 4) if window is not None else BlockCopy(2, 1))
    third.blocks, second.blocks = [1, 2], [5, 4]
    found += run(chunk(first, 1), chunk(second, 1), chunk(third, 1))
    return [*found, np.frombuffer(content, np.uint8)]


@pytest.mark.parametrize("kv_format", [some if some in SHORT else long(some) for some in get_args(KVFormat)])
def test_demo_model_steps_are_identical_on_all_backends(kv_format: KVFormat) -> None:
    results = []
    for make in BACKENDS:
        rng = np.random.default_rng(7)
        with runner_of(demo_path(), make(), kv_format) as runner:
            results.append(logits_of(runner, [rng.integers(0, 3000, n).tolist() for n in LENGTHS]))
            assert runner._captured, "no step was captured"
    ours, *others = results
    for theirs in others:
        assert len(ours) == len(theirs) == 17
        for a, b in zip(ours, theirs, strict=True):
            assert a.size or not b.size
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_logits_of_float_weights_are_identical_on_all_backends(tmp_path: Path) -> None:
    """Random weights in F32, whose products are not integers."""
    path, results = RANDOM.write(tmp_path / "random.gguf"), []
    ids = RANDOM.prompts(1, 5)[-1]
    for make in BACKENDS:
        with runner_of(path, make(), "f16") as runner:
            sequence = Sequence(ids)
            sequence.batch_index, sequence.blocks = 0, [0]
            rows = runner.run([chunk(sequence, len(ids))], lambda _: True)
            assert rows is not None
            results.append(rows[0].copy())
    for logits in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), logits.view(np.uint32))


def engine_on(backend: Backend, folder: Path | None = None, kv: KVFormat = "k8v8") -> Engine:
    cache_dir = None if folder is None else str(folder)
    config = EngineConfig(context_tokens=512, threads=1, kv=kv, max_num_seqs=3, cache_dir=cache_dir)
    return Engine(GGUFFile.open(demo_path()), config, backend)


PROMPT = RNG.integers(100, 3000, 150).tolist()


@pytest.mark.parametrize(
    ("kv", "first", "then"),
    [
        ("k8v8", 0, 1),
        ("k8v4", 0, 2),
        *(long("k8v8", first, then) for first, then in ((0, 2), (1, 0), (2, 0))),
        *(long("k8v4", first, then) for first, then in ((0, 1), (1, 0), (2, 0))),
    ],
)
def test_disk_cache_of_one_backend_is_used_by_another(tmp_path: Path, kv: KVFormat, first: int, then: int) -> None:
    said, cached = [], []
    for number in (first, then):
        with engine_on(BACKENDS[number](), tmp_path / "kv", kv) as engine:
            events = list(engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0)))
            usage = events[-2].usage
            assert usage is not None
            cached.append(usage.cached_tokens)
            said.append("".join(event.text for event in events))
            offload = engine._offload
            assert offload is not None
            until(lambda offload=offload: not offload.has_work)  # type: ignore[misc]
    assert said[0] == said[1] and cached[0] == 0 and cached[1] >= TILE_POSITIONS


def test_weights_are_uploaded_to_the_backend_once() -> None:
    backend = NumpyBackend()
    with engine_on(backend) as engine:
        list(engine.generate(PROMPT[:5], SamplingParams(max_tokens=2, temperature=0)))
        assert engine.info.kernels == "numpy" and engine.info.threads == 1
        assert engine.weight_placement == "mmap"
        matrices = [name for name, tensor in engine._file.tensors.items() if len(tensor.shape) == 2]
    assert sorted(name for name in backend.weights if name in matrices) == sorted(matrices)  # not the check's


def test_memory_plan_uses_available_memory_of_the_backend() -> None:
    with pytest.raises(OutOfMemoryError, match="numpy leaves 100 MiB"):
        engine_on(NumpyBackend(available_bytes=100 * MIB))


def test_numpy_backend_arrays_are_opaque() -> None:
    """Without this check, NumPy arrays could hide errors from this file's tests."""
    array = NumpyBackend().upload(np.zeros(3, np.float32))
    assert not isinstance(array, np.ndarray) and isinstance(array, OpaqueArray)
    with pytest.raises(TypeError, match="download"):
        np.asarray(array)
