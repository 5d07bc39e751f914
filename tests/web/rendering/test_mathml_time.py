"""The time limit of a formula in Markdown that is converted to MathML."""

from __future__ import annotations

import json
import signal

import pytest

from notso.web.rendering import mathml


def test_only_cpu_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        timers = {"clock": signal.ITIMER_REAL, "CPU": signal.ITIMER_VIRTUAL}
        # pytest may have a timer of its own, for minutes.
        return " ".join(name for name, which in timers.items() if 0 < signal.getitimer(which)[0] <= 1)

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    assert json.loads(mathml._convert(b'[["x", "inline"]]')) == ["CPU"]


def test_slow_formula_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        while tex == "slow":
            pass
        return f"<math>{tex}</math>"

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    monkeypatch.setattr(mathml, "FORMULA_SECONDS", 0.05)
    assert json.loads(mathml._convert(b'[["slow", "inline"], ["x", "inline"]]')) == [None, "<math>x</math>"]
