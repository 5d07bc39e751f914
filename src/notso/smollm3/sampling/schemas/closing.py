"""Close the objects of a schema that declare properties, so that a model does not invent names endlessly.

The result may allow fewer values, never more. Objects stay open if `additionalProperties` says so, or if closing would
leave too few names for `minProperties`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from notso.smollm3.sampling.schemas.negation import Negation, Schema, all_of, any_of

_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties", "required", "minProperties"))
_COMBINED = ("allOf", "anyOf", "oneOf")


class ObjectCloser:
    """Closes the schema of one document and its definitions.

    A definition used alone is closed under its own name. If it is one of several parts of a value, the parts are closed
    together and refer to the open version by a second name.
    """

    def __init__(
        self,
        definitions: dict[str, Schema],
        declared: Container[int],
        negation: Negation,
        refusal: Callable[[list[Schema]], Exception],
        spend: Callable[[], None],
    ) -> None:
        """declared: ids of the values of `properties` that declare properties. negation: over the open definitions.
        refusal: of a `oneOf` with these options, which overlap."""
        self._open = definitions
        self._negation = negation
        self._refusal = refusal
        self._declared = declared
        self._spend = spend
        self._pending: list[tuple[str, bool]] = []
        self._made: dict[str, Schema] = {}
        self._seen: set[str] = set()

    def closed(self, schema: Schema) -> tuple[Schema, dict[str, Schema]]:
        """Return the closed schema and the definitions it refers to."""
        result = self._alone(schema)
        while self._pending:
            name, is_part = self._pending.pop()
            target = self._open.get(name, True)
            self._made[f"{name}_part" if is_part else name] = self._part(target) if is_part else self._alone(target)
        return result, self._made

    def _reference(self, reference: str, *, is_part: bool) -> str:
        name = reference.rpartition("/")[2]
        made = f"{name}_part" if is_part else name
        if made not in self._seen:
            self._seen.add(made)
            self._pending.append((name, is_part))
        return f"#/$defs/{made}"

    def _alone(self, schema: Schema) -> Schema:
        """Close a schema that describes a value alone."""
        self._spend()
        if not isinstance(schema, dict):
            return schema
        applied = [keyword for keyword in (*_COMBINED, "$ref") if keyword in schema]
        if not applied:
            return {**self._inside(schema), **self._rest(schema)}
        if len(applied) == 1 and not _OBJECTS & schema.keys():
            keyword = applied[0]
            if keyword == "$ref":
                return {**schema, "$ref": self._reference(schema["$ref"], is_part=False)}
            if keyword != "allOf" or len(schema["allOf"]) == 1:
                options = [self._alone(each) for each in schema[keyword]]
                held = self._inside(schema) | {keyword: options}
                return self._exclusive(schema, held, list(map(self._closing, schema.get("oneOf", ()))))
        rest = self._rest(schema)
        return {**self._combined(schema, rest), **rest}

    def _exclusive(self, schema: dict[str, Any], held: dict[str, Any], closings: list[Schema]) -> dict[str, Any]:
        """Exclude other options from each closed one: the open ones, because those decide what is valid."""
        if "oneOf" not in held:
            return held
        besides = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        excluded = self._negation.exclusions(schema["oneOf"], is_exact=False, besides=besides, closings=closings)
        if excluded is None:
            raise self._refusal(schema["oneOf"])
        options = any_of(all_of([option, *more]) for option, more in zip(held.pop("oneOf"), excluded, strict=True))
        return {**held, "allOf": [*held.get("allOf", ()), options]}

    def _closing(self, schema: Schema) -> Schema:
        return self._rest(schema) or True if isinstance(schema, dict) else True

    def _part(self, schema: Schema) -> Schema:
        """Prepare a schema that describes a value together with others."""
        self._spend()
        return self._combined(schema) if isinstance(schema, dict) else schema

    def _combined(self, schema: dict[str, Any], rest: dict[str, Any] | None = None) -> dict[str, Any]:
        held = self._inside(schema)
        for keyword in _COMBINED:
            if keyword in schema:
                held[keyword] = [self._part(each) for each in schema[keyword]]
        if "$ref" in schema:
            held["$ref"] = self._reference(schema["$ref"], is_part=True)
        return self._exclusive(schema, held, [rest or True] * len(schema.get("oneOf", ())))

    def _inside(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Close the members and items."""
        held = dict(schema)
        for keyword in ("properties", "patternProperties"):
            if keyword in schema:
                held[keyword] = {name: self._alone(each) for name, each in schema[keyword].items()}
        for keyword in ("additionalProperties", "items"):
            if keyword in schema:
                held[keyword] = self._alone(schema[keyword])
        if "prefixItems" in schema:
            held["prefixItems"] = [self._alone(each) for each in schema["prefixItems"]]
        return held

    def _rest(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords that close an object over the names of all its parts."""
        names: dict[str, None] = {}
        required: dict[str, None] = {}
        declares, least = False, 0
        for part in self._parts(schema, set()):
            if "additionalProperties" in part:
                return {}
            declares |= id(part.get("properties")) in self._declared
            names |= dict.fromkeys(part.get("properties", {}))
            required |= dict.fromkeys(part.get("required", ()))
            least = max(least, part.get("minProperties", 0))
        names |= required
        if not declares or (least > len(names) and "patternProperties" not in schema):
            return {}
        own = self._inside({"properties": schema.get("properties", {})})["properties"]
        return {
            "properties": {**own, **{name: True for name in names if name not in own}},
            "additionalProperties": False,
        }

    def _parts(self, schema: Schema, followed: set[str]) -> Iterator[dict[str, Any]]:
        self._spend()
        if not isinstance(schema, dict):
            return
        yield schema
        for keyword in _COMBINED:
            for each in schema.get(keyword, ()):
                yield from self._parts(each, followed)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            yield from self._parts(self._open.get(reference.rpartition("/")[2], True), followed)
