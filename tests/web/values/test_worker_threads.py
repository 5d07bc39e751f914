"""A thread pool that cannot start all of its threads."""

from __future__ import annotations

import threading

import pytest

from notso.web.values.fair_queue import WorkerThreads


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_running_threads_take_over_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with WorkerThreads(2) as pool:
        first = pool.submit(go.wait, 60)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        second = pool.submit(lambda: "done")
        go.set()
        assert first.result(60) and second.result(60) == "done"


def test_rejected_work_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    with WorkerThreads(2) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    pool.submit(ran.append, "refused")
        pool.submit(ran.append, "accepted").result(60)
    assert ran == ["accepted"]
