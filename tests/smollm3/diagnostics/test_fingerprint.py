"""A fingerprint depends on the model's results: equal for all kernel families, different for other weights."""

from __future__ import annotations

from pathlib import Path

from golden.dequantized import write_dequantized

from notso import Engine
from notso.qtensor.backends.cpu import kernel_choice
from notso.smollm3.diagnostics.verification import answer_fingerprint, model_fingerprint
from notso.smollm3.hub.registry import demo_path


def of(path: Path, threads: int = 1) -> str:
    with Engine.load(path, context_tokens=128, threads=threads) as engine:
        assert model_fingerprint(engine) == model_fingerprint(engine), "the cache must not affect it"
        return model_fingerprint(engine)


def test_fingerprint_is_equal_for_all_kernels_and_thread_counts(tmp_path: Path) -> None:
    before, found = kernel_choice.kernels(), set()
    try:
        for family in kernel_choice.available_kernels():
            kernel_choice.use_kernels(family)
            found.add(of(demo_path()))
    finally:
        kernel_choice.use_kernels(before)
    assert len(found) == 1 and found == {of(demo_path(), threads=2)}
    assert {of(write_dequantized(demo_path(), tmp_path / "f32.gguf"))}.isdisjoint(found)


def test_answer_fingerprint_distinguishes_its_parts() -> None:
    assert answer_fingerprint("a", "b") == answer_fingerprint("a", "b") != answer_fingerprint("ab", "")
    assert len(answer_fingerprint("\udcff")) == 16
