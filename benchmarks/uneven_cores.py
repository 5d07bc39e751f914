"""Check whether a second thread on a busy core makes kernels slower than a single thread.

    python benchmarks/uneven_cores.py [--seconds 2] [--rounds 5]

Requires Linux, two CPUs, and for quotas, permission to create cgroups (version 1, as root). The calling thread is
pinned to one CPU and the second thread to another, where a busy process competes with it or a quota throttles it. One
and two threads alternate. The measured operation is the product of one batch row with 11,008 x 2,048 weights in Q4_K,
as in a decode step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from notso.qtensor import CPU, Q4_K, QTensor, kernel_choice, random_blocks

OPS = CPU()
ROWS, K = 11008, 2048
TASKS = Path("/proc/self/task")
CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_MS = 100


@contextlib.contextmanager
def nothing(worker: int, cpu: int) -> Iterator[None]:
    """Leave the core undisturbed."""
    yield


@contextlib.contextmanager
def hog(worker: int, cpu: int) -> Iterator[None]:
    """Run a busy process with the same priority on the core."""
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def idle_beside_hog(worker: int, cpu: int) -> Iterator[None]:
    """Run a busy process on the core, and give the thread idle priority."""
    os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
    with hog(worker, cpu):
        yield


def quota(percent: int) -> Callable[[int, int], contextlib.AbstractContextManager[None]]:
    """Limit the thread to a share of every tenth of a second."""

    @contextlib.contextmanager
    def throttled(worker: int, cpu: int) -> Iterator[None]:
        group = CGROUPS / f"notso-{worker}"
        group.mkdir()
        try:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MS * 1000))
            (group / "cpu.cfs_quota_us").write_text(str(percent * PERIOD_MS * 10))
            (group / "tasks").write_text(str(worker))
            yield
        finally:
            with contextlib.suppress(OSError):  # the thread may still be in the group
                group.rmdir()

    return throttled


CASES = {
    "undisturbed": nothing,
    "busy process on it": hog,
    "busy process, idle priority": idle_beside_hog,
    "quota of 50 %": quota(50),
    "quota of 10 %": quota(10),
}


def products(weight: QTensor, seconds: float) -> float:
    """Return the products per second."""
    x, y = np.ones((1, K), np.float32), np.empty((1, ROWS), np.float32)
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        OPS.matmul(x, weight, y)
        count += 1
    return count / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    rng = np.random.default_rng(1)
    weight = QTensor("w", Q4_K, (ROWS, K), random_blocks(Q4_K, ROWS * K // 256, rng).reshape(-1))
    print("| the second core | one thread | two threads | ratio | its share of the work |")
    print("|---|---:|---:|---:|---:|")
    for name, case in CASES.items():
        alone, both, shares = [], [], []
        for _ in range(given.rounds):
            kernel_choice.set_threads(1)
            os.sched_setaffinity(0, {first})
            before = {task.name for task in TASKS.iterdir()}
            kernel_choice.set_threads(2)
            (worker,) = {task.name for task in TASKS.iterdir()} - before
            os.sched_setaffinity(int(worker), {second})
            with case(int(worker), second):
                both.append(products(weight, given.seconds))
                caller_items, worker_items = kernel_choice.work_shares()
                kernel_choice.set_threads(1)  # the disturbance of the other core continues
                alone.append(products(weight, given.seconds))
            shares.append(worker_items / (caller_items + worker_items))
        one, two = statistics.median(alone), statistics.median(both)
        ratio = statistics.median(b / a for a, b in zip(alone, both, strict=True))
        print(
            f"| {name} | {one:,.0f} | {two:,.0f} | {ratio:.2f} | {100 * statistics.median(shares):.0f} % |", flush=True
        )


if __name__ == "__main__":
    main()
