"""Constraints on whole arrays, expressed as alternatives with one schema per item."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from notso.smollm3.sampling.schemas.negation import Schema, all_types_but, any_of

MAX_ARRANGEMENTS = 130
"""Maximum permutations of `uniqueItems` that are listed."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

CONTAINED_WITHIN = 4
"""Number of leading items among which `contains` must match."""


def containing(item: Schema, least: int) -> Schema:
    """Return arrays with `item` among the first few items, or that begin with `least` of them."""
    places = [range(least)] if least > 1 else [range(at, at + 1) for at in range(CONTAINED_WITHIN)]
    arrays = (
        {
            "type": "array",
            "prefixItems": [item if at in place else True for at in range(place.stop)],
            "minItems": place.stop,
        }
        for place in places
    )
    return any_of([all_types_but(["array"]), *arrays])


def plain_values(items: Schema) -> list[Any] | None:
    """Return all values of the items if they are listed and neither arrays nor objects."""
    if not isinstance(items, dict):
        return None
    if items == {"type": "boolean"}:
        return [False, True]
    if items.get("type") == "integer" and items.keys() <= {"type", *_BOUNDS}:
        return _integers(items)
    values = items.get("enum", [items["const"]] if "const" in items else None)
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return list({(isinstance(value, bool), value): value for value in values}.values())


def _integers(items: dict[str, Any]) -> list[Any] | None:
    """Return all integers within bounds, if they are few."""
    low, high = items.get("minimum", -math.inf), items.get("maximum", math.inf)
    if "exclusiveMinimum" in items:
        low = max(low, math.floor(items["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in items:
        high = min(high, math.ceil(items["exclusiveMaximum"]) - 1)
    if not high - low <= MAX_ARRANGEMENTS:  # or not bounded at all
        return None
    return list(range(math.ceil(low), math.floor(high) + 1))


def arrangements(values: Sequence[Any], least: int, most: float) -> Schema | None:
    """Return arrays of distinct values in any order, or in the given one if there are many orders; None if still too
    many."""
    sizes = range(least, int(min(most, len(values))) + 1)
    for arrange in (itertools.permutations, itertools.combinations):
        if sum(math.comb(len(values), size) for size in sizes) > MAX_ARRANGEMENTS:
            return None
        arranged = itertools.chain.from_iterable(arrange(values, size) for size in sizes)
        lists = list(itertools.islice(arranged, MAX_ARRANGEMENTS + 1))
        if len(lists) <= MAX_ARRANGEMENTS:
            return any_of([all_types_but(["array"]), *map(_array_of, lists)])
    return None


def _array_of(values: Sequence[Any]) -> Schema:
    items = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def other_items(schema: dict[str, Any], rest: Schema) -> Schema:
    """Apply `rest` to the items that `schema` does not constrain."""
    declared = schema.get("items")
    is_list = isinstance(declared, list)
    if ("items" in schema and not is_list) or (is_list and "additionalItems" in schema):
        return True
    before = declared if is_list else schema.get("prefixItems")
    count = len(before) if isinstance(before, list) else 0
    return {"prefixItems": [True] * count, "items": rest} if count else {"items": rest}
