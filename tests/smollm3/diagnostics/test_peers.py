"""Peers of a benchmark: the configuration that each task runs in, and the ratios. A fake module stands in for one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli.test_bench_compare import STAND_IN

from notso.smollm3.diagnostics.benchmark import Samples, _BenchmarkRun
from notso.smollm3.diagnostics.peers.process import PeerProcess, Task
from notso.smollm3.hub.registry import demo_path

TASKS: tuple[Task, ...] = (("prefill", 32, 16), ("decode", 4, 0), ("batch", 4, 3))


def test_each_task_runs_in_its_fastest_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with PeerProcess("llama.cpp", demo_path(), 64, 1) as peer:
        peer.tune(TASKS)
        assert all("f16 cache, flash attention on" in peer.configuration(task) for task in TASKS)
        assert peer.measure(("decode", 4, 0)) == pytest.approx([0.005] * 4), "a step takes 5 milliseconds"


def test_ratios_divide_our_rates_by_the_peers() -> None:
    rounds = object.__new__(_BenchmarkRun)
    rounds.ours = {task: Samples([30.0]) for task in TASKS}
    rounds.theirs = {task: Samples([10.0 * at]) for at, task in enumerate(TASKS, start=1)}
    peer = SimpleNamespace(
        name="a peer", version="1", load_s=1.0, configuration=lambda task: task[0], resident_mb=lambda: 5.0
    )
    found: dict[str, Any] = rounds.comparison(cast(PeerProcess, peer))
    rows = [row for kind in ("prefill", "decode", "batch") for row in found["peer"][kind]]
    assert [(row["tok_s"], row["configuration"]) for row in rows] == [(10, "prefill"), (20, "decode"), (30, "batch")]
    ratios = [row for kind in ("prefill", "decode", "batch") for row in found["ratio"][kind]]
    assert [row["ratio"] for row in ratios] == [3, 1.5, 1]
