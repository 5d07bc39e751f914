"""The engine's choice of a device, its messages about it, and cleanup after GPU failures."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from stub_gpu.gpu import LOST, OUT_OF_MEMORY, calls, installed, left, live, set_up

from notso.qtensor import CUDA, MIB, DeviceError
from notso.qtensor.backends.cuda import driver
from notso.smollm3 import Engine, EngineConfig, EngineError, InvalidRequestError, OutOfMemoryError, SamplingParams
from notso.smollm3.engine import device_choice
from notso.smollm3.engine import engine as engine_module
from notso.smollm3.engine.input_processor import InputProcessor

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub

PROMPT = np.random.default_rng(5).integers(100, 3000, 9).tolist()
GREEDY = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture(autouse=True)
def nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_excluded", {})


@pytest.fixture
def gpu() -> Iterator[Callable[..., None]]:
    """Use the stub driver during the test; call the yielded function to change its behavior."""
    gc.collect()
    before = live()
    with installed():
        yield set_up
        gone = left(before)  # while the driver has the test's devices
    assert gone == 0, "allocations remain on the device"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the comparison of the device with the CPU, which takes most of a load. Other tests here include it."""
    monkeypatch.setattr(engine_module, "require_equal_results", lambda *_: None)


def load(device: str) -> Engine:
    return Engine.load(context_tokens=512, threads=1, max_num_seqs=2, device=device)


def said(engine: Engine) -> str:
    return "".join(event.text for event in engine.generate(PROMPT, GREEDY))


def test_auto_device_uses_cpu_without_note_if_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-absent.so.1")
    with load("auto") as engine:
        assert (engine.info.device, engine.info.device_note) == ("cpu", "")
    with pytest.raises(DeviceError, match="no GPU driver is installed"):
        load("cuda")


def test_auto_device_selects_available_gpu(gpu: Callable[..., None]) -> None:
    gpu(devices=2)
    answers, names = [], []
    for device in ("cpu", "auto", "cuda:1"):
        with load(device) as engine:
            answers.append(said(engine))
            names.append(engine.info.device)
            assert engine.info.device_note == ""
    assert names[0] == "cpu" and names[1].startswith("cuda:0 (") and names[2].startswith("cuda:1 (")
    assert answers[0] == answers[1] == answers[2] != ""


@pytest.mark.parametrize(
    ("settings", "wanted", "words"),
    [
        ({"version": 11000}, DeviceError, "too old"),
        ({"devices": 0}, DeviceError, "no GPU|no CUDA|none"),
        ({"architecture": 60}, DeviceError, "60|6.0"),
        ({"memory": 20 << 20}, OutOfMemoryError, "cuda:0 leaves 20 MiB; the weights alone are"),
    ],
)
def test_unusable_gpu_falls_back_to_cpu_with_a_one_line_note(
    gpu: Callable[..., None], settings: dict[str, int], wanted: type[Exception], words: str
) -> None:
    gpu(**settings)
    with pytest.raises(wanted, match=words):
        load("cuda")
    with load("auto") as engine:
        assert engine.info.device == "cpu" and said(engine)
        note = engine.info.device_note
    assert re.search(words, note) and "\n" not in note


@pytest.mark.parametrize("points", [3, pytest.param(30, marks=pytest.mark.long("native", "engine"))])
def test_gpu_out_of_memory_during_load_frees_all_allocations(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, points: int
) -> None:
    before, counts, there = calls(), list[int](), live()
    make = InputProcessor.__init__

    def look(self: InputProcessor, *arguments: Any) -> None:
        counts.append(calls() - before)  # by now, the engine has made all its allocations on the device
        make(self, *arguments)

    monkeypatch.setattr(InputProcessor, "__init__", look)
    load("cuda").close()
    (count,) = counts
    fell_back = 0
    for number in range(5, count, count // points):
        gpu(fail_with=OUT_OF_MEMORY, fail_at=number)
        with load("auto") as engine:
            gpu(fail_at=0)
            if engine.info.device == "cpu":
                assert engine.info.device_note
                fell_back += 1
        del engine
        assert left(there) == 0, f"call {number} leaves allocations behind"
    assert fell_back >= points // 3, "only failures while freeing memory are harmless"


def test_gpu_with_differing_results_is_not_used(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    right = CUDA.download

    def wrong(self: CUDA, array: Any) -> Any:
        values = right(self, array)
        values.reshape(-1).view(np.uint8)[0] ^= 1
        return values

    monkeypatch.setattr(CUDA, "download", wrong)
    with pytest.raises(DeviceError, match=r"cuda:0 \(.*\) differs from the CPU in: .*Q4_K of 1 rows"):
        load("cuda")
    with load("auto") as engine:
        assert engine.info.device == "cpu" and "differs from the CPU in" in engine.info.device_note


@pytest.mark.usefixtures("unchecked")
def test_lost_gpu_fails_the_answer_and_later_loads_use_cpu(gpu: Callable[..., None]) -> None:
    heard = []
    engine = load("cuda")
    wanted = said(engine)
    engine.when_lost(lambda: heard.append("lost"))
    gpu(fail_with=LOST, fail_at=3)
    with pytest.raises(EngineError, match="the GPU failed during this answer; send the request again"):
        list(engine.generate(PROMPT[:7], GREEDY))
    engine.close()
    assert heard == ["lost"]
    with pytest.raises((EngineError, InvalidRequestError), match="closed"):
        engine.submit(PROMPT, GREEDY)
    gpu(fail_at=0)
    for device in ("cuda", "auto"):
        with load(device) as other:
            assert other.info.device == "cpu" and other.info.device_note
            assert said(other) == wanted, "the bits are the same"


@pytest.mark.usefixtures("unchecked")
def test_memory_plan_uses_gpu_memory(gpu: Callable[..., None]) -> None:
    gpu(memory=600 * MIB)
    with load("cuda") as engine:
        assert engine.info.memory is not None
        assert engine.info.memory.source == "cuda:0" and engine.info.memory.available_bytes <= 600 * MIB


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:100", "CPU", "", "cuda:1 "])
def test_invalid_device_name_is_rejected(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="device must be auto, cpu, cuda or cuda:N"):
        EngineConfig(device=name)
