"""Weights are moved to huge pages, packed if kernels support that, during answers, without changing results."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from twins import PACKED

from notso.qtensor import CPU
from notso.qtensor.backends.cpu import huge_pages, kernel_choice
from notso.qtensor.formats import Q4_K
from notso.smollm3 import Engine, InvalidRequestError, Message, SamplingParams
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weight_placement import WeightPlacement
from notso.smollm3.model.weights import SmolLM3Weights
from notso.system.memory import huge_pages_available

IDS = [5, 9, 2, 77, 300, 41, 8, 8, 120]

needs_huge_pages = pytest.mark.skipif(not huge_pages_available(), reason="this system has no huge pages")


def answer(engine: Engine) -> list[str]:
    params = SamplingParams(max_tokens=12, temperature=0)
    return [event.text for event in engine.generate(IDS, params) if event.kind in ("text", "reasoning")]


def answers(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[str]:
    """Return answers that are generated together."""
    streams = [engine.generate(prompt, params) for prompt, params in asked]
    return ["".join(event.text for event in events if event.kind in ("text", "reasoning")) for events in streams]


@needs_huge_pages
def test_placement_does_not_change_logits_or_answers() -> None:
    with Engine.load(demo_path(), weights="mmap") as mapped, Engine.load(demo_path(), weights="packed") as moved:
        assert mapped.weight_placement == "mmap"
        moved.wait_for_placement(200)  # fast, except on a busy machine
        assert moved.weight_placement == ("packed" if kernel_choice.is_packed(Q4_K) else "hugepages")
        expected = mapped.logits(IDS)
        assert np.array_equal(moved.logits(IDS).view(np.uint32), expected.view(np.uint32))
        assert answer(moved) == answer(mapped)


@needs_huge_pages
def test_moving_weights_during_an_answer_keeps_the_text() -> None:
    with Engine.load(demo_path(), weights="mmap") as mapped:
        expected = answer(mapped)
    with Engine.load(demo_path(), weights="packed") as moved:  # copies the weights during this answer
        assert answer(moved) == expected
        moved.wait_for_placement(200)  # fast, except on a busy machine
        assert answer(moved) == expected


class OneLayerAStep:
    """A placement that starts before step `first` of an answer, and copies a layer or the head per step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        self._steps_left = first
        self._copied = threading.Event()
        self.is_answering = False
        self._start, self._adopt = WeightPlacement.start, WeightPlacement.adopt
        self._placements: list[WeightPlacement] = []  # without those of idle engines of other tests
        monkeypatch.setattr(WeightPlacement, "start", lambda placement: self._placements.append(placement))
        monkeypatch.setattr(WeightPlacement, "adopt", lambda placement, weights: self._adopt_next(placement, weights))

    def wake(self) -> None:
        self._copied.set()

    def _adopt_next(self, placement: WeightPlacement, weights: SmolLM3Weights) -> SmolLM3Weights | None:
        if self.is_answering and placement in self._placements:
            self._steps_left -= 1
            if self._steps_left == 0:
                placement._wake = self.wake
                self._start(placement)
            while self._steps_left <= 0 and not (placement._ready or placement.finished.is_set()):
                self._copied.wait(1)
                self._copied.clear()
        return self._adopt(placement, weights)


@needs_huge_pages
@pytest.mark.parametrize("family", kernel_choice.available_kernels())
def test_packing_weights_layer_by_layer_keeps_the_text(family: str, own_kernels: None) -> None:
    """Every family accepts packed weights, some with the generic kernels, and answers do not change."""
    kernel_choice.use_kernels(family)
    with Engine.load(demo_path(), weights="mmap") as mapped:
        expected = answer(mapped)
    for first in (1, 2, 3):  # eight layers and the head are replaced during the answer's twelve steps
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(huge_pages, "is_packed", lambda format: format.name in PACKED)
            steps = OneLayerAStep(monkeypatch, first)
            with Engine.load(demo_path(), weights="packed") as moved:
                assert moved.weight_placement == "0 % copied to huge pages"
                steps.is_answering = True
                assert answer(moved) == expected
                assert moved.weight_placement == "packed"
                assert answer(moved) == expected


@needs_huge_pages
@pytest.mark.long("native")
@pytest.mark.timeout(0)
def test_packing_weights_keeps_200_random_answers(own_kernels: None) -> None:
    """Sampled answers to random prompts, one to three concurrently; packing starts at a random step of each."""
    random = np.random.default_rng(3)
    families = kernel_choice.available_kernels()
    answered = 0
    while answered < 200:
        kernel_choice.use_kernels(families[answered % len(families)])
        asked = [
            (
                random.integers(0, 400, random.integers(1, 150)).tolist(),
                SamplingParams(max_tokens=24, temperature=0.9, seed=int(random.integers(1 << 30)), ignore_eos=True),
            )
            for _ in range(random.integers(1, 4))
        ]
        with Engine.load(demo_path(), weights="mmap") as mapped:
            expected = answers(mapped, asked)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(huge_pages, "is_packed", lambda format: format.name in PACKED)
            steps = OneLayerAStep(monkeypatch, int(random.integers(1, 12)))
            with Engine.load(demo_path(), weights="packed") as moved:
                steps.is_answering = True
                assert answers(moved, asked) == expected
                assert moved.weight_placement == "packed"
        answered += len(asked)


def test_small_files_stay_mapped_by_default() -> None:
    with Engine.load(demo_path()) as engine:
        engine.wait_for_placement(1)
        assert engine.weight_placement == "mmap"


def test_released_pages_are_read_again_from_the_file() -> None:
    from notso.qtensor.gguf import GGUFFile

    with GGUFFile.open(demo_path()) as file:
        tensor = max(file.tensors.values(), key=lambda t: t.nbytes)
        before = tensor.data.copy()
        file.release(tensor)
        assert np.array_equal(tensor.data, before)


def test_unknown_weights_option_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="auto, mmap, packed or hugepages"):
        Engine.load(demo_path(), weights="swap")  # type: ignore[arg-type]


def test_requested_huge_pages_must_be_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is also right for a GPU, to which the weights are copied anyway."""
    monkeypatch.setattr(CPU, "has_weight_arena", False)
    with pytest.raises(InvalidRequestError, match="not available on this system or GPU; use weights=mmap"):
        Engine.load(demo_path(), weights="packed", device="cpu")


def test_close_ends_an_unread_answer() -> None:
    engine = Engine.load(demo_path())
    events = engine.generate([Message("user", "hello")], SamplingParams(max_tokens=20, temperature=0))
    next(events)
    engine.close()
    assert [event.kind for event in events][-2:] == ["usage", "end"]
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.logits(IDS)


def test_failed_engine_load_stops_unstarted_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the constructor of an engine fails, its parts are closed before their threads have started."""
    stopped: list[str] = []
    stop = WeightPlacement.stop

    def fail(placement: WeightPlacement) -> None:
        stop(placement)
        stopped.append(placement.state)
        raise RuntimeError("no thread")

    monkeypatch.setattr(WeightPlacement, "start", fail)
    with pytest.raises(RuntimeError, match="no thread"):
        Engine.load(demo_path(), weights="hugepages")
    assert stopped == ["mmap"]
