"""The parameters of a recipe, and the digest that identifies a run."""

from __future__ import annotations

from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notso.smollm3 import InvalidRequestError
from notso.smollm3.tuning import trainer
from notso.smollm3.tuning.trainer import RUN_FILE, Recipe, TuningError, run_start_date


@pytest.mark.parametrize(
    "field",
    [{"rank": 0}, {"rank": 513}, {"learning_rate": float("nan")}, {"epochs": 0}, {"holdout": 1.0}, {"seed": -1}],
)
def test_out_of_range_recipe_value_is_named(field: dict[str, float]) -> None:
    (name,) = field
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        Recipe(**field)  # type: ignore[arg-type]


def test_recipe_digest_depends_on_settings_and_inputs() -> None:
    assert Recipe().digest(b"a", b"b") == Recipe().digest(b"a", b"b")
    others = [Recipe(seed=1).digest(b"a", b"b"), Recipe().digest(b"ab", b""), Recipe().digest(b"b", b"a")]
    assert len({Recipe().digest(b"a", b"b"), *others}) == 4


@pytest.mark.parametrize("value", [None, "8", True, [1], 10**400], ids=repr)
@pytest.mark.parametrize("name", [each.name for each in fields(Recipe)])
def test_recipe_value_of_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        Recipe(**{name: value})


def test_errors_of_a_recipe_state_the_type_and_the_range() -> None:
    wrong: Any
    for wrong in (2.0, True, 10**5000):
        with pytest.raises(InvalidRequestError, match="epochs must be a whole number from 1 to 10,000"):
            Recipe(epochs=wrong)
    with pytest.raises(InvalidRequestError, match=r"learning_rate must be a number from 1e-07 to 1\.0"):
        Recipe(learning_rate=2)


def test_numbers_of_a_recipe_can_be_numpy_floats() -> None:
    assert Recipe(learning_rate=np.float64(1e-3)).digest() == Recipe(learning_rate=1e-3).digest()


@pytest.mark.parametrize("value", [1.5, float("inf")])
def test_counts_of_a_recipe_must_be_whole(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="epochs must be"):
        Recipe(epochs=value)


@pytest.mark.parametrize(
    "record", ["[]", "5", "null", "{", "[" * 100_000, "\ud800", "{}"], ids=lambda text: ascii(text[:5])
)
def test_damaged_record_of_a_run_is_refused(record: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(record, "utf-8", "surrogatepass")
    assert run_start_date(tmp_path) is None
    with pytest.raises(TuningError, match="use --restart"):
        trainer._open_run(tmp_path, "digest", date(2024, 1, 1), Recipe())
