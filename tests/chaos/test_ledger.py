"""docs/reliability.md matches the stored results, and every result belongs to a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos import ledger

ROOT = Path(__file__).parents[2]
ENTRIES = ledger.kept()


def test_reliability_page_matches_stored_results() -> None:
    assert (ROOT / "docs" / "reliability.md").read_text() == ledger.report(ENTRIES)


def test_stored_results_match_chaos_tests() -> None:
    """Every attack has been run at full length, so each test has a result."""
    tests = {
        name: "ledger" in arguments
        for path in Path(__file__).parent.glob("test_*.py")
        for name, arguments in re.findall(r"^def (test_\w+)\((.*?)\) ->", path.read_text(), re.MULTILINE | re.DOTALL)
    }
    measured = {name.partition("[")[0] for name in ENTRIES}
    assert measured == {name for name, attacks in tests.items() if attacks}


@pytest.mark.parametrize("figure", ["memory rise MB", "log MB"])
def test_figure_over_limit_raises(figure: str) -> None:
    entry = ledger.Ledger("test_nothing")
    if not ledger.LONG:
        entry.note("clients", "nothing", "1 of it", 0, {figure: ledger.LIMITS[figure]})
        with pytest.raises(AssertionError, match="over the limit"):
            entry.note("clients", "nothing", "1 of it", 0, {figure: ledger.LIMITS[figure] + 1})


def test_note_with_failures_raises() -> None:
    if not ledger.LONG:
        with pytest.raises(AssertionError, match="1 failed"):
            ledger.Ledger("test_nothing").note("clients", "nothing", "1 of it", 1)
