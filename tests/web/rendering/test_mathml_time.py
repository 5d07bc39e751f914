"""Limits on the time and size of formulas in Markdown that are converted to MathML."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from notso.system.confinement import ConfinedWorkError, Limits
from notso.web.rendering import mathml
from notso.web.values import child_work


def converted(*formulas: str, seconds: float = 60.0, most_bytes: int = 1 << 20) -> list[str | None]:
    request = {"formulas": [[tex, "inline"] for tex in formulas], "seconds": seconds, "bytes": most_bytes}
    found: list[str | None] = json.loads(mathml._convert(json.dumps(request).encode()))["mathml"]
    return found


def test_only_cpu_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        timers = {"clock": signal.ITIMER_REAL, "CPU": signal.ITIMER_VIRTUAL}
        # pytest may have a timer of its own, for minutes.
        return " ".join(name for name, which in timers.items() if 0 < signal.getitimer(which)[0] <= 1)

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    assert converted("x") == ["CPU"]


def test_slow_formula_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        while tex == "slow":
            pass
        return f"<math>{tex}</math>"

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    monkeypatch.setattr(mathml, "FORMULA_SECONDS", 0.05)
    assert converted("slow", "x") == [None, "<math>x</math>"]


def test_time_of_all_formulas_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(tex: str, style: str) -> str:
        while tex == "slow":
            pass
        return tex

    monkeypatch.setattr(mathml, "tex_to_mathml", convert)
    monkeypatch.setattr(mathml, "FORMULA_SECONDS", 0.05)
    assert converted("x", "slow", "x", seconds=0.02) == ["x", None, None]


def test_size_of_mathml_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathml, "tex_to_mathml", lambda tex, style: tex)
    assert converted("x" * 9, "x" * 2, "x", most_bytes=10) == ["x" * 9, None, "x"]


def test_short_formulas_with_macros_cannot_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MathML of each of these formulas is a hundred times as long as its TeX."""
    monkeypatch.setattr(mathml, "PAGE_BYTES", 1 << 19)
    monkeypatch.setattr(mathml, "MOST_AT_ONCE", 50)
    tex = r"\def\a{xxxxxxxxxx}\def\b{" + r"{\a}" * 10 + "}" + r"{\b}" * 10
    formulas = f'<span class="math inline">{tex}</span>' * 100
    html, failed = asyncio.run(mathml.convert_formulas(formulas))
    assert 50 < failed < 100
    assert len(html) <= len(formulas) + mathml.PAGE_BYTES


@pytest.mark.parametrize("is_killed", [False, True])
def test_slow_formulas_of_a_page_are_left_as_tex(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    calls = []

    async def run(program: str, request: bytes, limits: Limits) -> bytes:
        calls.append(json.loads(request)["formulas"])
        if is_killed:
            raise ConfinedWorkError("took too long")
        return json.dumps({"mathml": [None] * len(calls[-1]), "seconds": mathml.PAGE_SECONDS}).encode()

    monkeypatch.setattr(child_work, "run_confined", run)
    formulas = '<span class="math inline">x</span>' * (3 * mathml.MOST_AT_ONCE)
    assert asyncio.run(mathml.convert_formulas(formulas)) == (formulas, 3 * mathml.MOST_AT_ONCE)
    assert len(calls) == 1
