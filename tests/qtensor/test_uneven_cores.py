"""Cores that differ: each takes the work it can do, a very slow one is not waited for, and no bit changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import Q4_K
from notso.qtensor.tensor import QTensor

ROOT = Path(__file__).parents[2]
TASKS = Path("/proc/self/task")
PRODUCTS = 60

Make = Callable[..., QTensor]


def test_the_pool_with_workers_that_differ(tmp_path: Path) -> None:
    """tests/native/uneven_cores.cpp: 1 to 128 threads, slow ones, one that stops now and then, a slow caller."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "uneven_cores"
    sources = [ROOT / "tests/native/uneven_cores.cpp", ROOT / "native/runtime/threads.cpp"]
    built = [*compiler.split(), "-std=c++20", "-O1", f"-I{ROOT / 'native'}", *map(str, sources), "-pthread"]
    subprocess.run([*built, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


@contextmanager
def hogged(cpu: int, other: int) -> Iterator[None]:
    """Two threads in the pool: the caller on `other`, and one that gets what a busy process on `cpu` leaves it."""
    kernel_choice.set_threads(1)
    alone = {int(task.name) for task in TASKS.iterdir()}
    before = os.sched_getaffinity(0)
    hog = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"])
    try:
        kernel_choice.set_threads(2)
        (worker,) = {int(task.name) for task in TASKS.iterdir()} - alone
        os.sched_setaffinity(worker, {cpu})
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(0, {other})
        yield
    finally:
        hog.kill()
        hog.wait()
        os.sched_setaffinity(0, before)
        kernel_choice.set_threads(1)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or not TASKS.is_dir(), reason="threads are told apart as Linux does")
def test_a_hogged_core_takes_less(make_weight: Make) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("there is one CPU here, and a hog wants one of its own")
    rng = np.random.default_rng(4)
    weight, x = make_weight(Q4_K, 2048, 2048, rng), rng.standard_normal((1, 2048), np.float32)
    expected, y = np.empty((1, 2048), np.float32), np.empty((1, 2048), np.float32)
    kernel_choice.set_threads(1)
    ops.matmul(x, weight, expected)
    with hogged(cpus[1], cpus[0]):
        for _ in range(PRODUCTS):
            y[:] = np.nan
            ops.matmul(x, weight, y)
            np.testing.assert_array_equal(y, expected)
        caller, worker = kernel_choice.work_shares()
    assert caller + worker >= PRODUCTS * 16
    assert worker < caller / 2
