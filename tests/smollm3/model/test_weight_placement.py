"""Weights move to large pages, packed where kernels take that, while the engine answers. Nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from notso.qtensor.backends.cpu import kernel_choice
from notso.qtensor.formats import Q4_K
from notso.smollm3 import Engine, InvalidRequestError, Message, SamplingParams
from notso.smollm3.hub.registry import demo_path
from notso.system.pages import have_huge_pages

IDS = [5, 9, 2, 77, 300, 41, 8, 8, 120]

needs_huge_pages = pytest.mark.skipif(not have_huge_pages(), reason="this system gives no huge pages")


def answer(engine: Engine) -> list[str]:
    params = SamplingParams(max_tokens=12, temperature=0)
    return [event.text for event in engine.generate(IDS, params) if event.kind in ("text", "reasoning")]


@needs_huge_pages
def test_same_bits_before_and_after() -> None:
    with Engine.load(demo_path(), weights="mmap") as mapped, Engine.load(demo_path(), weights="packed") as moved:
        assert mapped.weight_placement == "mmap"
        moved.wait_for_placement(200)  # in no time, but on a busy machine
        assert moved.weight_placement == ("packed" if kernel_choice.is_packed(Q4_K) else "hugepages")
        expected = mapped.logits(IDS)
        assert np.array_equal(moved.logits(IDS).view(np.uint32), expected.view(np.uint32))
        assert answer(moved) == answer(mapped)


@needs_huge_pages
def test_weights_change_between_two_steps_of_one_answer() -> None:
    with Engine.load(demo_path(), weights="mmap") as mapped:
        expected = answer(mapped)
    with Engine.load(demo_path(), weights="packed") as moved:  # copying while this answers
        assert answer(moved) == expected
        moved.wait_for_placement(200)  # in no time, but on a busy machine
        assert answer(moved) == expected


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


def test_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="auto, mmap, packed or hugepages"):
        Engine.load(demo_path(), weights="swap")  # type: ignore[arg-type]


def test_closing_does_not_wait_for_a_reader_that_has_left() -> None:
    engine = Engine.load(demo_path())
    events = engine.generate([Message("user", "hello")], SamplingParams(max_tokens=20, temperature=0))
    next(events)
    engine.close()
    assert [event.kind for event in events][-2:] == ["usage", "end"]
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.logits(IDS)


def test_what_was_not_started_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that fails while it is made is closed before its threads run."""
    from notso.smollm3.model.weight_placement import WeightPlacement

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
