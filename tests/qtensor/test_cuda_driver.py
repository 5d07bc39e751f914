"""Every error of the CUDA driver, simulated by a stub, raises our error and leaves nothing allocated on the device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from stub_gpu.gpu import LOST, OUT_OF_MEMORY, calls, installed, left, library, set_up

from notso.qtensor import CUDA, Q4_K, DeviceError, DeviceLostError, DeviceMemoryError, QTensor, RMSNorm
from notso.qtensor.backends.cuda import driver

RNG = np.random.default_rng(3)
WEIGHT = QTensor.quantize(RNG.standard_normal((32, 256), np.float32), Q4_K, "w")
X = RNG.standard_normal((3, 256), np.float32)

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub


def refused(number: int = 0, **settings: int) -> str:
    with installed(**settings), pytest.raises(DeviceError) as error:
        CUDA(number)
    assert left() == 0
    return str(error.value)


def test_missing_driver_raises_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-absent.so.1")
    with pytest.raises(DeviceError, match="no GPU driver is installed"):
        CUDA()


def test_library_without_cuda_symbols_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    with pytest.raises(DeviceError, match="too old: it has no cuInit"):
        CUDA()


def test_unusable_driver_or_gpu_is_rejected_with_the_reason() -> None:
    assert "too old: it supports CUDA 11.4" in refused(version=11040)
    assert refused(devices=0) == "the GPU driver found no GPU"
    assert "cannot be initialized" in refused(devices=-1)
    assert refused(2, devices=2) == "there is no GPU 2; available: 0 to 1"
    assert "its architecture is 75, but 80 or later is required" in refused(architecture=75)


def some_work() -> tuple[np.ndarray, np.ndarray]:
    """Return the results of a product that runs immediately, and of one that is recorded and replayed."""
    gpu = CUDA()
    weight, x, norm = gpu.weight(WEIGHT), gpu.upload(X), gpu.upload(np.ones(256, np.float32))
    (pool,) = gpu.key_value_pools(1, 2, 1, 16, "k8v8")
    pool.copy_block(0, 1)
    out, again = gpu.empty(3, 32), gpu.empty(3, 32)
    gpu.matmul(x, weight, out)
    program = gpu.program()
    with program.record():
        gpu.matmul(x, weight, again, norm=RMSNorm(norm, 1e-6))
    program.run()
    return gpu.download(out), gpu.download(again)


@pytest.mark.parametrize(("result", "wanted"), [(OUT_OF_MEMORY, DeviceMemoryError), (LOST, DeviceLostError)])
def test_failure_of_any_driver_call_is_typed_and_frees_memory(result: int, wanted: type[DeviceError]) -> None:
    before = calls()
    with installed():
        right = some_work()
        gc.collect()
        gc.freeze()  # exclude older objects, so that the collections below are fast
        count = calls() - before
        assert left() == 0 and count > 40
        kinds = set()
        for number in range(1, count + 1):
            set_up(fail_with=result, fail_at=number)
            try:
                assert all(np.array_equal(a, b) for a, b in zip(some_work(), right, strict=True))
            except DeviceError as error:
                kinds.add(type(error))
                assert "\n" not in str(error)
                error.__traceback__ = None
            assert left() == 0, f"call {number} leaves allocations behind"
            set_up(fail_at=0)
        gc.unfreeze()
        assert wanted in kinds and kinds <= {wanted, DeviceError}


def test_memory_reports_free_device_memory() -> None:
    with installed(memory=100 << 20):
        gpu = CUDA()
        assert gpu.memory().available_bytes == 100 << 20
        kept = gpu.empty(1 << 10, 1 << 10)
        assert gpu.memory().available_bytes == 96 << 20
        with pytest.raises(DeviceMemoryError, match="out of memory"):
            gpu.empty(25, 1 << 20)
        del kept
        assert gpu.memory().available_bytes == 100 << 20


def test_all_kernels_are_found() -> None:
    assert library().stub_kernels() == 54
