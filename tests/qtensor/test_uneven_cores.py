"""On cores of different speed, faster threads take more of the work, no product waits for a very slow thread, and
results do not change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import Q4_K
from notso.qtensor.tensor import QTensor

ROOT = Path(__file__).parents[2]
TASKS = Path("/proc/self/task")
CGROUPS = Path("/sys/fs/cgroup/cpu")  # cgroups version 1, which can contain single threads
PRODUCTS = 400

Make = Callable[..., QTensor]


def test_thread_pool_handles_workers_of_different_speed(tmp_path: Path) -> None:
    """The program runs 1 to 128 threads, some of which are slow or pause, and a slow caller."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "uneven_cores"
    sources = [ROOT / "tests/native/uneven_cores.cpp", ROOT / "native/runtime/threads.cpp"]
    command = [*compiler.split(), "-std=c++20", "-O1", f"-I{ROOT / 'native'}", *map(str, sources), "-pthread"]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


@contextmanager
def two_threads(cpu: int, other: int) -> Iterator[int]:
    """Pin the caller to CPU `other` and the other thread of the pool to `cpu`; yield the id of the latter."""
    kernel_choice.set_threads(1)
    alone = {int(task.name) for task in TASKS.iterdir()}
    before = os.sched_getaffinity(0)
    try:
        kernel_choice.set_threads(2)
        (worker,) = {int(task.name) for task in TASKS.iterdir()} - alone
        os.sched_setaffinity(worker, {cpu})
        os.sched_setaffinity(0, {other})
        yield worker
    finally:
        os.sched_setaffinity(0, before)
        kernel_choice.set_threads(1)


@contextmanager
def hogged(worker: int, cpu: int) -> Iterator[None]:
    """Run a busy process on the thread's CPU, and give the thread only the time that is left."""
    hog = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"])
    try:
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        hog.kill()
        hog.wait()


@contextmanager
def throttled(worker: int, cpu: int) -> Iterator[None]:
    """Limit the thread to 2 of every 100 ms."""
    group = CGROUPS / f"notso-test-{worker}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("2000")
        (group / "tasks").write_text(str(worker))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"a cgroup with a CPU quota cannot be created here: {error}")
    try:
        yield
    finally:
        (CGROUPS / "tasks").write_text(str(worker))
        group.rmdir()


Disturbed = Callable[[int, int], AbstractContextManager[None]]


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or not TASKS.is_dir(), reason="uses thread ids of Linux")
@pytest.mark.parametrize("disturbed", [hogged, throttled])
def test_disturbed_core_takes_less_work(disturbed: Disturbed, make_weight: Make) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("requires two CPUs")
    rng = np.random.default_rng(4)
    weight, x = make_weight(Q4_K, 2048, 2048, rng), rng.standard_normal((1, 2048), np.float32)
    expected, y = np.empty((1, 2048), np.float32), np.empty((1, 2048), np.float32)
    kernel_choice.set_threads(1)
    ops.matmul(x, weight, expected)
    with two_threads(cpus[1], cpus[0]) as worker, disturbed(worker, cpus[1]):
        for _ in range(PRODUCTS):
            y[:] = np.nan
            ops.matmul(x, weight, y)
            np.testing.assert_array_equal(y, expected)
        of_caller, of_worker = kernel_choice.work_shares()
    assert of_caller + of_worker >= PRODUCTS * 16
    assert of_worker < of_caller
