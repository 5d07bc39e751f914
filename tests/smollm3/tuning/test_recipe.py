"""The parameters of a recipe, and the digest that identifies a run."""

from __future__ import annotations

import pytest

from notso.smollm3 import InvalidRequestError
from notso.smollm3.tuning.trainer import Recipe


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
