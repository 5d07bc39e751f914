"""Threads share rows without changing a bit; their number is limited, and ended pools leave no threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.errors import KernelChoiceError
from notso.qtensor.formats import FORMATS, Q4_K, Q6_K, Format
from notso.qtensor.tensor import QTensor
from notso.system.processors import usable_cores, usable_processors

COUNTS = (1, 2, 3, 8)

Make = Callable[..., QTensor]


def on_every_count(compute: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    results = []
    for count in COUNTS:
        kernel_choice.set_threads(count)
        assert kernel_choice.threads() == count
        results.append(compute())
    for count, result in zip(COUNTS, results, strict=True):
        np.testing.assert_array_equal(result, results[0], err_msg=f"{count} threads")
    return results[0]


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_thread_count_does_not_change_products(format: Format, make_weight: Make) -> None:
    rng = np.random.default_rng(1)
    weights = [make_weight(format, rows, 512, rng) for rows in (1000, 31)]
    for columns in (1, 9, 70):
        x = rng.standard_normal((columns, 512), np.float32)

        def compute(x: npt.NDArray[np.float32] = x) -> npt.NDArray[np.float32]:
            outs = [np.full((len(x), w.rows), np.nan, np.float32) for w in weights]
            ops.matmul_many(x, list(zip(weights, outs, strict=True)))
            return np.concatenate([o.reshape(-1) for o in outs])

        for family in kernel_choice.available_kernels():
            kernel_choice.use_kernels(family)
            assert np.isfinite(on_every_count(compute)).all()


def test_thread_count_does_not_change_rows_and_attention(make_weight: Make) -> None:
    rng = np.random.default_rng(2)
    pool = ops.key_value_pool(6, 2, 64)
    tables = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    k, v = rng.standard_normal((2, 300, 2, 64), np.float32)
    positions = np.arange(300, dtype=np.int32)
    for s in (0, 1):
        ops.store_key_values(k, v, positions, np.full(300, s, np.int32), tables, pool)
    q = rng.standard_normal((300, 8, 64), np.float32)
    sequences = rng.integers(0, 2, 300).astype(np.int32)
    x = rng.standard_normal((300, 512), np.float32)
    weight = rng.standard_normal(512, np.float32)
    table = np.empty((300, 32), np.float32), np.empty((300, 32), np.float32)
    ops.rope_table(0.5 ** np.arange(32, dtype=np.float64), np.arange(300, dtype=np.int32), table)
    embedding, ids = make_weight(Q6_K, 64, 512, rng), rng.integers(0, 64, 300).astype(np.int32)

    def compute() -> npt.NDArray[np.float32]:
        attended, normed, gated, rows = np.empty_like(q), np.empty_like(x), np.empty_like(x), np.empty_like(x)
        ops.attention(q, positions, sequences, tables, pool, 0.125, attended)
        ops.rms_norm(x, weight, 1e-6, normed)
        ops.silu_mul(x, normed, gated)
        ops.embed_rows(embedding, ids, rows)
        ops.add(rows, gated, rows)
        ops.softmax(gated)
        ops.rope(attended, positions, table, adjacent=True)
        return np.concatenate([a.reshape(-1) for a in (attended, normed, gated, rows)])

    assert np.isfinite(on_every_count(compute)).all()


@pytest.mark.parametrize("count", [0, -1, 1025, 2**31 - 1])
def test_invalid_thread_count_is_rejected(count: int) -> None:
    before = kernel_choice.threads()
    with pytest.raises(KernelChoiceError):
        kernel_choice.set_threads(count)
    assert kernel_choice.threads() == before


def threads_of_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_replaced_thread_pools_leave_no_threads() -> None:
    kernel_choice.set_threads(1)
    alone = threads_of_process()
    for count in (4, 2, 7, 1, 3, 1):
        kernel_choice.set_threads(count)
        until = time.monotonic() + 60  # the system may still list a joined thread for a moment
        while len(threads_of_process() - alone) != count - 1:
            assert time.monotonic() < until, "only one pool remains, and the caller is one of its threads"
            time.sleep(0.001)


def test_more_threads_than_rows_and_cores_give_correct_products(make_weight: Make) -> None:
    """Oversubscription may be slow, but must finish with correct results."""
    weight = make_weight(Q4_K, 3, 256, np.random.default_rng(3))
    x, y, expected = np.ones((1, 256), np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32)
    kernel_choice.set_threads(1)
    ops.matmul(x, weight, expected)
    kernel_choice.set_threads(16)
    for _ in range(50):
        y[:] = 0
        ops.matmul(x, weight, y)
        np.testing.assert_array_equal(y, expected)


def test_concurrent_callers_get_correct_results() -> None:
    kernel_choice.set_threads(2)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((40, 2048), np.float32)
        weight, first, out = np.ones(2048, np.float32), np.empty_like(x), np.empty_like(x)
        ops.rms_norm(x, weight, 1e-6, first)
        for _ in range(40):
            ops.rms_norm(x, weight, 1e-6, out)
            if not np.array_equal(first, out):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_computes_without_the_thread_pool() -> None:
    """A forked child has none of the threads. It must neither hang nor crash, even if it sets threads or exits."""
    code = (
        "import os, numpy as np\n"
        "from notso.qtensor.backends.cpu import kernel_choice, ops\n"
        "kernel_choice.set_threads(3)\n"
        "x = np.ones((64, 4096), np.float32)\n"
        "ops.add(x, x, x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ops.add(x, x, x)\n"
        "    kernel_choice.set_threads(2)\n"
        "    ops.add(x, x, x)\n"
        "    os._exit(0 if (x == 8).all() else 3)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "ops.add(x, x, x)\n"
        "assert status == 0 and (x == 4).all(), status\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="the system must limit the address space")
def test_failure_to_start_threads_raises() -> None:
    code = (
        "import resource\n"
        "from notso.qtensor.backends.cpu import kernel_choice\n"
        "from notso.qtensor.errors import KernelChoiceError\n"
        "kernel_choice.set_threads(2)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    kernel_choice.set_threads(1024)\n"
        "except KernelChoiceError:\n"
        "    assert kernel_choice.threads() == 2\n"
        "else:\n"
        "    raise SystemExit('1024 threads were started within one GiB of address space')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_default_thread_count_is_the_usable_cores() -> None:
    assert 1 <= usable_cores() <= usable_processors() <= (os.cpu_count() or 1)
    kernel_choice.configure(None)
    assert kernel_choice.threads() == usable_cores()
    kernel_choice.configure(3)
    assert kernel_choice.threads() == 3
