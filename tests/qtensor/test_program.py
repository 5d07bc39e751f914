"""Recorded programs give the bits of eager calls, keep their arrays alive, read current contents, and are safe."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.errors import OperandError
from notso.qtensor.formats import Q4_K, Q6_K
from notso.qtensor.reference.ops import inverse_frequencies
from notso.qtensor.tensor import QTensor

Floats = npt.NDArray[np.float32]
Make = Callable[..., QTensor]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


class Layer:
    """A small decoder layer that uses every operation once, with its own arrays."""

    def __init__(self, make_weight: Make, rows: int) -> None:
        rng = np.random.default_rng(9)
        self.rows = rows
        self.embedding = make_weight(Q6_K, 50, 256, rng)
        self.query, self.key, self.value = (make_weight(Q4_K, n, 256, rng) for n in (256, 64, 64))
        self.norm = 1 + rng.standard_normal(256, np.float32) * np.float32(0.1)
        self.frequencies = inverse_frequencies(32, 1e4)
        self.table = np.zeros((400, 16), np.float32), np.zeros((400, 16), np.float32)
        self.all_positions = np.arange(400, dtype=np.int32)
        self.pool = ops.key_value_pool(4, 2, 32)
        self.tables = np.array([[3, 0, 1]], np.int32)
        self.ids = rng.integers(0, 50, rows).astype(np.int32)
        self.positions = np.arange(rows, dtype=np.int32)
        self.sequences = np.zeros(rows, np.int32)
        self.x, self.h = (np.zeros((rows, 256), np.float32) for _ in range(2))
        self.q, self.k, self.v = (np.zeros((rows, n), np.float32) for n in (256, 64, 64))
        self.o, self.gate = (np.zeros((rows, 256), np.float32) for _ in range(2))
        self.last = np.array([rows - 1], np.int32)
        self.end = np.zeros((1, 256), np.float32)
        self.logits = np.zeros((1, 50), np.float32)
        self.best = np.zeros(1, np.int32)

    def step(self) -> None:
        places = self.positions, self.sequences, self.tables
        ops.embed_rows(self.embedding, self.ids, self.x)
        ops.rms_norm(self.x, self.norm, 1e-6, self.h)
        ops.matmul_many(self.h, [(self.query, self.q), (self.key, self.k), (self.value, self.v)])
        q, k, v = (a.reshape(self.rows, -1, 32) for a in (self.q, self.k, self.v))
        ops.rope_table(self.frequencies, self.all_positions, self.table)
        ops.rope(q, self.positions, self.table, adjacent=True)
        ops.rope(k, self.positions, self.table, adjacent=True)
        ops.store_key_values(k, v, *places, self.pool)
        ops.attention(q, *places, self.pool, 32**-0.5, self.o.reshape(self.rows, 8, 32))
        ops.silu_mul(self.o, self.q, self.gate)
        ops.add(self.gate, self.x, self.x)
        ops.gather_rows(self.x, self.last, self.end)
        ops.matmul(self.end, self.embedding, self.logits)
        ops.argmax(self.logits, self.best)
        ops.softmax(self.logits)

    def state(self) -> Floats:
        parts = (self.x, self.h, self.q, self.k, self.v, self.o, self.gate, self.end, self.logits)
        return np.concatenate([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_replay_matches_eager_calls(rows: int, make_weight: Make, every_family: Every) -> None:
    eager, recorded = Layer(make_weight, rows), Layer(make_weight, rows)
    program = ops.Program()
    with program.record():
        recorded.step()
    assert len(program) == 14 and not recorded.state().any(), "recording computes nothing"

    def both() -> Floats:
        for layer, go in ((eager, eager.step), (recorded, program.run)):
            layer.pool.data[:] = 0
            go()
        np.testing.assert_array_equal(eager.state(), recorded.state())
        assert eager.best == recorded.best
        return recorded.state().copy()

    assert np.isfinite(every_family(both)).all()


def test_replay_reads_current_array_contents(make_weight: Make) -> None:
    """Decode token by token with one program whose ids and positions change in place; the bits equal a prefill's."""
    whole, single = Layer(make_weight, 140), Layer(make_weight, 1)
    whole.step()
    program = ops.Program()
    with program.record():
        single.step()
    for position in range(140):
        single.ids[0], single.positions[0] = whole.ids[position], position
        program.run()
        np.testing.assert_array_equal(single.x[0], whole.x[position])
    np.testing.assert_array_equal(single.logits, whole.logits)


def test_arrays_live_as_long_as_the_program(make_weight: Make) -> None:
    program = ops.Program()
    a, b, out = (np.full((64, 512), v, np.float32) for v in (1.0, 2.0, 0.0))
    weight = make_weight(Q4_K, 8, 512, np.random.default_rng(1))
    y = np.zeros((64, 8), np.float32)
    alive = [weakref.ref(x) for x in (a, b, y)]
    with program.record():
        ops.add(a, b, out)
        ops.matmul(out, weight, y)
    expected = np.zeros((64, 8), np.float32)
    ops.matmul(np.full((64, 512), 3.0, np.float32), weight, expected)
    result = weakref.ref(y)
    del a, b, y, weight
    gc.collect()
    for _ in range(20):  # would overwrite freed memory
        np.full((64, 512), np.nan, np.float32)
    program.run()
    assert (out == 3).all()
    kept = result()
    assert kept is not None
    np.testing.assert_array_equal(kept, expected)
    del kept, program
    gc.collect()
    assert all(ref() is None for ref in alive), "a deleted program must not keep arrays alive"


def test_rejected_operation_is_not_recorded() -> None:
    program = ops.Program()
    x = np.ones((2, 3), np.float32)
    with program.record():
        with pytest.raises(OperandError):
            ops.add(x, x, np.ones((3, 2), np.float32))
        ops.add(x, x, x)
    assert len(program) == 1
    program.run()
    assert (x == 2).all()


def test_error_during_recording_ends_the_recording() -> None:
    program, x = ops.Program(), np.ones((1, 4), np.float32)
    with pytest.raises(KeyError), program.record():
        raise KeyError
    ops.add(x, x, x)
    assert (x == 2).all() and len(program) == 0


def test_only_one_recording_per_thread_is_allowed() -> None:
    program, other = ops.Program(), ops.Program()
    x = np.ones((1, 4), np.float32)
    with program.record():
        with pytest.raises(OperandError, match="recorded"), other.record():
            pass
        ops.add(x, x, x)
        seen = []
        thread = threading.Thread(target=lambda: (ops.add(x, x, x), seen.append(x[0, 0])))
        thread.start()
        thread.join()
        assert seen == [2.0], "another thread's operations run immediately"
        ops.add(x, x, x)
    assert len(program) == 2 and len(other) == 0


def test_replay_stops_at_the_failing_step() -> None:
    """Steps before the failing one have run; it and later steps have written nothing. The next run succeeds."""
    x, ids, row, out = (np.ones((3, 4), np.float32), np.array([1], np.int32), *np.zeros((2, 1, 4), np.float32))
    program = ops.Program()
    with program.record():
        ops.add(x, x, x)
        ops.gather_rows(x, ids, row)
        ops.add(row, row, out)
    ids[0] = 3
    with pytest.raises(OperandError, match="outside"):
        program.run()
    assert (x == 2).all() and not row.any() and not out.any()
    ids[0] = 0
    program.run()
    assert (x == 4).all() and (row == 4).all() and (out == 8).all()


def test_replay_releases_the_interpreter_lock(make_weight: Make) -> None:
    """The program releases the interpreter lock: another thread counts during a long run."""
    weight = make_weight(Q4_K, 2048, 2048, np.random.default_rng(2))
    x, y = np.ones((64, 2048), np.float32), np.zeros((64, 2048), np.float32)
    program = ops.Program()
    with program.record():
        for _ in range(6):
            ops.matmul(x, weight, y)
    kernel_choice.use_kernels("generic")
    kernel_choice.set_threads(1)
    gaps, done = [], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    program.run()
    took = time.perf_counter() - start
    done.set()
    watcher.join()
    assert took > 0.2, "the run must take long enough for a comparison"
    assert len(gaps) > 5 and max(gaps) < 0.9 * took, "if the lock were held, one gap would last the whole run"


def test_concurrent_programs_give_correct_results(make_weight: Make) -> None:
    weight = make_weight(Q4_K, 96, 512, np.random.default_rng(3))
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal((n, 512), np.float32) for n in (1, 3, 17, 40)]
    expected = [np.zeros((len(x), 96), np.float32) for x in inputs]
    for x, y in zip(inputs, expected, strict=True):
        ops.matmul(x, weight, y)
    failures: list[int] = []

    def work(index: int) -> None:
        y = np.zeros_like(expected[index])
        program = ops.Program()
        with program.record():
            ops.matmul(inputs[index], weight, y)
        for _ in range(60):
            y[:] = 0
            program.run()
            if not np.array_equal(y, expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for count in (2, 1, 3, 2):
        kernel_choice.set_threads(count)
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert not failures
