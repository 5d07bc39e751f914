"""The time limit of a formula in Markdown that is converted to MathML."""

from __future__ import annotations

import json
import time

import pytest

from notso.web.rendering import mathml


def test_time_in_which_the_process_does_not_run_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        time.sleep(0.1)  # as if all cores were busy with other processes
        return f"<math>{tex}</math>"

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    monkeypatch.setattr(mathml, "FORMULA_SECONDS", 0.05)
    assert json.loads(mathml._convert(b'[["x", "inline"]]')) == ["<math>x</math>"]


def test_slow_formula_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        while tex == "slow":
            pass
        return f"<math>{tex}</math>"

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    monkeypatch.setattr(mathml, "FORMULA_SECONDS", 0.05)
    assert json.loads(mathml._convert(b'[["slow", "inline"], ["x", "inline"]]')) == [None, "<math>x</math>"]
