"""If a GPU fails while the server runs, the CPU takes over without intervention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from stub_gpu.gpu import LOST, installed, left, live, set_up

from notso.smollm3 import Engine
from notso.smollm3.engine import device_choice

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub driver

Start = Callable[..., Any]


def test_lost_engine_is_replaced_by_newly_loaded_model(start: Start) -> None:
    engines = [ScriptedEngine(lambda *_, name=name: say(f"by {name}"), name=name) for name in ("first", "second")]
    left = list(engines)
    server = start(lambda: left.pop(0)).ready()
    assert server.finished(server.ask("one")).content == "by first"
    engines[0].lose()
    server.wait(lambda: server.client.get("/health").json().get("model") == "second")
    assert engines[0].closed and server.finished(server.ask("two")).content == "by second"
    engines[0].lose()  # a failure report from a replaced engine has no effect
    assert server.finished(server.ask("three")).content == "by second"


def test_cpu_takes_over_after_gpu_loss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_excluded", {})
    before = live()
    with installed():
        server = start(lambda: Engine.load(context_tokens=512, threads=1, max_num_seqs=2)).ready()
        assert server.client.get("/health").json()["device"].startswith("cuda:0 (")
        set_up(fail_with=LOST, fail_at=1)
        taken_up = server.finished(server.ask("Hello"))
        assert taken_up.state == "done" and taken_up.content, "the answer was finished on the CPU"
        set_up(fail_at=0)
        assert server.client.get("/health").json().get("device") == "cpu"
        answered = server.finished(server.ask("Hello"))
        assert answered.state == "done" and answered.content
        assert 'notso_device{device="cpu"} 1.0' in server.client.get("/metrics").text
        server.close()
    assert left(before) == 0
