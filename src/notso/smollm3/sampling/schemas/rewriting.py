"""Rewrite JSON schemas so that they use only keywords that the library (llguidance) supports.

Apart from ignored keywords and formats, the result allows only values that the schema allows. It allows fewer values
where a grammar cannot express all of them: properties must be in the order of the schema, `contains` must be satisfied
by the first few items (by one of them, unless `minContains` is larger), and `unevaluatedProperties` allows the names of
only one branch.

`contains` and `uniqueItems` are replaced by alternatives that specify a schema for each item separately.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urldefrag, urljoin

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.schemas.negation import (
    AUTOMATON_STEPS,
    Negation,
    Schema,
    all_of,
    all_types_except,
    any_of,
)
from notso.smollm3.sampling.schemas.patterns import (
    SHOWN_CHARACTERS,
    PatternError,
    has_lookaround,
    has_unwritable_characters,
    library_pattern,
    library_patterns,
    shorten,
)
from notso.smollm3.sampling.schemas.simplifying import (
    ANNOTATIONS,
    BOUNDS,
    FORMATS,
    MANY,
    MAX_PATTERN_PROPERTIES,
    NAMED,
    ONE,
    REFUSED,
    REWRITTEN,
    SILENT,
    VALUES,
    ObjectCloser,
    Simplifier,
)

T = TypeVar("T")

_OLD_DRAFTS = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
DATA = frozenset(("const", "enum", "default", "example", "examples"))


def is_old_draft(document: dict[str, Any]) -> bool:
    """Return whether a document uses draft 7 or older, in which keywords next to `$ref` are ignored."""
    dialect = document.get("$schema")
    return isinstance(dialect, str) and any(draft in dialect for draft in _OLD_DRAFTS)


class References:
    """Resolves references (pointers, anchors and ids) within a document. Nothing is downloaded."""

    def __init__(self, document: dict[str, Any], param: str) -> None:
        self._param = param
        self._resources: dict[str, Any] = {"": document}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._id_keyword = "id" if "draft-04" in str(document.get("$schema", "")) else "$id"
        self._is_old = is_old_draft(document)
        self._index(document)

    def _index(self, document: dict[str, Any]) -> None:
        pending: list[tuple[Any, str]] = [(document, "")]
        while pending:
            each, base = pending.pop()
            if isinstance(each, list):
                pending += ((inner, base) for inner in each)
            if not isinstance(each, dict):
                continue
            name = each.get(self._id_keyword)
            if isinstance(name, str) and not (self._is_old and "$ref" in each):
                address, fragment = _split_url(name)
                if address:
                    base = _join_url(base, address)
                    self._resources.setdefault(base, each)
                if fragment:
                    self._anchors[base, fragment] = each
            for keyword in ("$anchor", "$dynamicAnchor"):
                anchor = each.get(keyword)
                if isinstance(anchor, str):
                    self._anchors[base, anchor] = each
            self._bases[id(each)] = base
            pending += ((inner, base) for key, inner in each.items() if key not in DATA or isinstance(inner, dict))

    def target(self, schema: dict[str, Any], pointer: str) -> Any:
        """Return the target of a `$ref`. Raises InvalidRequestError if it is not in the document."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise InvalidRequestError(f"{pointer}/$ref must be text", param=self._param)
        address, fragment = _split_url(reference)
        base = self._bases.get(id(schema), "")
        if address:
            base = _join_url(base, address)
        resource = self._resources.get(base)
        if resource is not None:
            if (base, fragment) in self._anchors:
                return self._anchors[base, fragment]
            found = _resolve_pointer(resource, unquote(fragment)) if fragment[:1] in ("", "/") else None
            if found is not None:
                return found
        raise InvalidRequestError(
            f"{pointer}/$ref cannot be resolved within the schema: {reference[:80]}", param=self._param
        )


def _split_url(url: str) -> tuple[str, str]:
    try:
        return urldefrag(url)
    except ValueError:
        return url, ""


def _join_url(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:
        return address


def _resolve_pointer(document: Any, pointer: str) -> Any:
    found = document
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


MAX_ARRANGEMENTS = 130
"""Maximum number of alternative arrays that replace `uniqueItems`."""

CONTAINED_WITHIN = 4
"""At least one of this many leading items must match `contains`, if `minContains` is 1."""


def array_containing(item: Schema, least: int) -> Schema:
    """Return a schema that requires one of an array's first items to match `item`.

    If `least` > 1, all of the first `least` items must match.
    """
    places = [range(least)] if least > 1 else [range(at, at + 1) for at in range(CONTAINED_WITHIN)]
    arrays = (
        {
            "type": "array",
            "prefixItems": [item if at in place else True for at in range(place.stop)],
            "minItems": place.stop,
        }
        for place in places
    )
    return any_of([all_types_except(["array"]), *arrays])


def enumerate_values(items: Schema) -> list[Any] | None:
    """Return values that include all that match `items`, or None if they cannot be listed or compared."""
    if not isinstance(items, dict):
        return None
    if items == {"type": "boolean"}:
        return [False, True]
    if items.get("type") == "integer" and items.keys() <= {"type", *BOUNDS}:
        return _integers(items)
    values = items.get("enum", [items["const"]] if "const" in items else None)
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return list({(isinstance(value, bool), value): value for value in values}.values())


def _integers(items: dict[str, Any]) -> list[Any] | None:
    low, high = items.get("minimum", -math.inf), items.get("maximum", math.inf)
    if "exclusiveMinimum" in items:
        low = max(low, math.floor(items["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in items:
        high = min(high, math.ceil(items["exclusiveMaximum"]) - 1)
    if not high - low <= MAX_ARRANGEMENTS:  # also true if unbounded
        return None
    return list(range(math.ceil(low), math.floor(high) + 1))


def distinct_arrays(values: Sequence[Any], least: int, most: float) -> Schema | None:
    """Return a schema that requires arrays to consist of distinct `values`, or None if there are too many combinations.

    If there are too many permutations, the items must be in the order of `values`.
    """
    sizes = range(least, int(min(most, len(values))) + 1)
    count = len(values)
    if sum(_combinations(count, size) for size in sizes) > MAX_ARRANGEMENTS:
        return None
    for arrange in (itertools.permutations, itertools.combinations):
        arranged = itertools.chain.from_iterable(arrange(values, size) for size in sizes)
        lists = list(itertools.islice(arranged, MAX_ARRANGEMENTS + 1))
        if len(lists) <= MAX_ARRANGEMENTS:
            return any_of([all_types_except(["array"]), *map(_exact_array, lists)])
    return None


def _combinations(count: int, size: int) -> int:
    # Exact if `size` or `count - size` is at most 8. Otherwise, the result is a lower bound, because computing the
    # exact number can take minutes.
    return math.comb(count, min(size, count - size, 8))


def _exact_array(values: Sequence[Any]) -> Schema:
    items = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def remaining_items(schema: dict[str, Any], rest: Schema) -> Schema:
    """Return a schema that requires the items that `schema` does not constrain to match `rest`."""
    declared = schema.get("items")
    is_list = isinstance(declared, list)
    if ("items" in schema and not is_list) or (is_list and "additionalItems" in schema):
        return True
    before = declared if is_list else schema.get("prefixItems")
    count = len(before) if isinstance(before, list) else 0
    return {"prefixItems": [True] * count, "items": rest} if count else {"items": rest}


MAX_DEPTH = 32
MAX_STEPS = 100_000
"""Maximum number of steps to rewrite and compare schemas. This many steps take about a second on a slow machine."""

KEYWORDS_PER_STEP = 8
"""Number of keywords that can be read in the time of one step. Reading is counted, because references can lead to the
same long schema repeatedly."""

MAX_OPTIONS = 64
"""Maximum number of alternatives for one keyword."""


_CONDITIONAL = frozenset(("not", "if", "dependencies", "dependentSchemas"))
"""Keywords in which `properties` tests an object instead of declaring its properties."""

_ANY_NAME = ""
"""Pattern that matches every name."""

_Case = tuple[dict[str, Any], Schema]
"""A branch: the property names that it evaluates, by keyword, and a schema for the values that match it."""


class SchemaRewriter:
    """Rewrites one document. `ignored` contains the unknown keywords and formats.

    Raises InvalidRequestError with `param`.
    """

    def __init__(self, document: dict[str, Any], param: str) -> None:
        self._document = document
        self._refusal = partial(InvalidRequestError, param=param)
        self._is_old = is_old_draft(document)
        self._references = References(document, param)
        self._names: dict[int, str] = {}
        self._pending: dict[str, tuple[Any, str]] = {}  # by name: the target and the JSON pointer of a `$ref` to it
        self._definitions: dict[str, Schema] = {}
        self._negation = Negation(self._definition, self._count_steps)
        self._declared: dict[int, dict[str, Schema]] = {}  # by id(): rewritten `properties` outside conditions
        self._overlapping: dict[int, str] = {}  # by id(): pointers of `oneOf` lists whose options may overlap
        self._conditions = 0
        self._automata: set[str] = set()  # patterns that needed an automaton
        self._steps = 0
        self.ignored: dict[str, None] = {}

    def rewrite_document(self) -> tuple[Schema, dict[str, Schema]]:
        """Return the schema and, by name (NAME in `#/$defs/NAME`), its definitions."""
        schema = self._schema(self._document, "", 1)
        while self._pending:
            self._define(next(reversed(self._pending)))
        closed, definitions = ObjectCloser(
            self._definitions, self._declared, self._negation, self._overlap_error, self._count_steps
        ).closed(schema)
        return Simplifier(definitions, self._count_steps).simplified(closed)

    def _define(self, name: str) -> None:
        target, pointer = self._pending.pop(name)
        conditions, self._conditions = self._conditions, 0
        self._definitions[name] = self._schema(target, pointer, 1)
        self._conditions = conditions

    def _definition(self, reference: str) -> Schema | None:
        # Returns the target of a rewritten reference, or None while the target is being rewritten.
        name = reference.rpartition("/")[2]
        if name in self._pending:
            self._define(name)
        return self._definitions.get(name)

    def _schema(self, schema: Any, pointer: str, depth: int) -> Schema:
        self._count_steps()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refusal(f"{pointer or 'the schema'} must be a schema: an object or a boolean")
        self._count_steps(len(schema) // KEYWORDS_PER_STEP)
        if depth > MAX_DEPTH:
            raise self._refusal(f"{pointer} is nested more than {MAX_DEPTH} levels deep")
        if self._is_old and "$ref" in schema:
            return self._reference(schema, pointer)
        rewritten: dict[str, Any] = {}
        conjuncts: list[Schema] = []
        for keyword, value in schema.items():
            path = f"{pointer}/{keyword}"
            if keyword in VALUES:
                found = self._value(schema, keyword, value, path)
                conjuncts += found.pop("allOf", ())
                rewritten.update(found)
            elif keyword in ONE or keyword in MANY or keyword in NAMED:
                rewritten.update(self._inner(schema, keyword, value, path, depth))
            elif keyword == "format":
                constraints = self._format(value)
                if constraints.keys() & schema.keys() - {"format"}:
                    conjuncts.append(constraints)
                else:
                    rewritten.update(constraints)
            elif keyword in REWRITTEN:
                self._conditions += keyword in _CONDITIONAL
                conjuncts.append(self._rewrite_keyword(schema, keyword, value, pointer, depth))
                self._conditions -= keyword in _CONDITIONAL
            elif keyword in REFUSED:
                raise self._refusal(f"the schema's keyword {path} is not supported")
            elif keyword not in ANNOTATIONS and keyword not in SILENT:
                self.ignored[keyword] = None
        if "oneOf" in rewritten:
            conjuncts.append(self._one_of(rewritten.pop("oneOf"), f"{pointer}/oneOf"))
        conjuncts += self._require_min_properties(rewritten, pointer)
        conjuncts += self._unique_items(schema, rewritten, pointer)
        rest = all_of(conjuncts)
        if isinstance(rest, bool):
            return rewritten if rest else False
        return {**rewritten, "allOf": [*rewritten.get("allOf", ()), rest]} if rewritten else rest

    def _value(self, schema: dict[str, Any], keyword: str, value: Any, path: str) -> dict[str, Any]:
        match keyword:
            case "type":
                is_valid = isinstance(value, str) or (_is_name_list(value) and bool(value))
            case "enum":
                is_valid = isinstance(value, list) and bool(value)
            case "required":
                is_valid = _is_name_list(value)
            case "pattern":
                first, *others = self._convert_pattern(library_patterns, value, path)
                return {"pattern": first, **({"allOf": [{"pattern": each} for each in others]} if others else {})}
            case "const":
                is_valid = True
            case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):
                return {}  # draft 4: a flag, which is applied when the bound is rewritten
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf":
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_valid = is_number and abs(value) <= sys.float_info.max
                exclusive = keyword.replace("m", "exclusiveM", 1)
                keyword = exclusive if schema.get(exclusive) is True else keyword
            case _:
                is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
                is_valid = is_number and value == int(value) >= 0
                return {keyword: self._checked(int(value) if is_valid else value, is_valid, path)}
        for each in _scalars(value) if keyword in ("const", "enum") else ():
            if isinstance(each, str) and has_unwritable_characters(each):
                raise self._refusal(f"{path} contains control characters, which cannot be generated")
            if isinstance(each, int) and not _is_exact(each):
                raise self._refusal(
                    f"{path} contains the number {str(each)[:40]}, which cannot be represented exactly; use a string"
                )
        return {keyword: self._checked(value, is_valid, path)}

    def _convert_pattern(self, convert: Callable[[str], T], value: Any, path: str) -> T:
        pattern: str = self._checked(value, isinstance(value, str), path)
        try:
            if pattern not in self._automata and has_lookaround(pattern):
                self._automata.add(pattern)
                self._count_steps(AUTOMATON_STEPS)
            return convert(pattern)
        except PatternError as error:
            raise self._refusal(f"{path} {error}: {shorten(pattern)}") from None

    def _checked(self, value: Any, is_valid: bool, path: str) -> Any:
        if not is_valid:
            raise self._refusal(f"{path} has an invalid value")
        return value

    def _inner(self, schema: dict[str, Any], keyword: str, value: Any, path: str, depth: int) -> dict[str, Any]:
        if keyword == "items" and isinstance(value, list):  # draft 2019-09 and older
            rewritten = self._inner(schema, "prefixItems", value, path, depth)
            if "additionalItems" in schema:
                rewritten["items"] = self._schema(schema["additionalItems"], f"{path}/additionalItems", depth + 1)
            return rewritten
        if keyword in ONE:
            return {keyword: self._schema(value, path, depth + 1)}
        if keyword in MANY:
            options = self._checked(value, isinstance(value, list) and bool(value), path)
            return {keyword: [self._schema(each, f"{path}/{n}", depth + 1) for n, each in enumerate(options)]}
        named = self._checked(value, isinstance(value, dict), path)
        if keyword == "patternProperties" and len(named) > MAX_PATTERN_PROPERTIES:  # checked before patterns are parsed
            raise self._refusal(
                f"patternProperties has {len(named)} members; at most {MAX_PATTERN_PROPERTIES} are supported"
            )
        schemas = {name: self._schema(each, f"{path}/{name}", depth + 1) for name, each in named.items()}
        if keyword == "patternProperties":
            patterns: dict[str, list[Schema]] = {}
            for name, each in schemas.items():
                pattern = self._convert_pattern(library_pattern, name, path)
                patterns.setdefault(pattern, []).append(each)  # two patterns may be converted to the same one
            schemas = {name: all_of(each) for name, each in patterns.items()}
        elif not self._conditions:
            self._declared[id(schemas)] = schemas
        return {keyword: schemas}

    def _rewrite_keyword(self, schema: dict[str, Any], keyword: str, value: Any, pointer: str, depth: int) -> Schema:
        path = f"{pointer}/{keyword}"

        def inner(subschema: Any) -> Schema:
            return self._schema(subschema, path, depth + 1)

        match keyword:
            case "$ref":
                return self._reference(schema, pointer)
            case "not":
                return self._negate(inner(value), path)
            case "if":
                return self._conditional(schema, pointer, depth)
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                named = self._checked(value, isinstance(value, dict), path)
                return all_of(self._dependency(name, each, inner, path) for name, each in named.items())
            case "propertyNames":
                return self._property_names(inner(value), path)
            case "contains":
                return self._contains(schema, inner(value), pointer)
            case "unevaluatedProperties":
                return self._unevaluated(schema, inner(value), path, depth)
            case "unevaluatedItems":
                if {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "contains"} & schema.keys():
                    raise self._refusal(
                        f"the schema's keyword {path} is not supported together with contains, references or keywords "
                        "that combine schemas"
                    )
                return remaining_items(schema, inner(value))
        return True  # uniqueItems is handled by `_unique_items`, which needs the rewritten items

    def _reference(self, schema: dict[str, Any], pointer: str) -> Schema:
        target = self._references.target(schema, pointer)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._pending[name] = target, f"{pointer}/$ref"
        return {"$ref": f"#/$defs/{name}"}

    def _format(self, value: Any) -> dict[str, Any]:
        if isinstance(value, str) and value in FORMATS:
            return dict(FORMATS[value])
        self.ignored[f"format: {value}" if isinstance(value, str) else "format"] = None
        return {}

    def _negate(self, schema: Schema, path: str) -> Schema:
        negated = self._negation.of(schema)
        if negated is None:
            raise self._refusal(f"the schema's keyword {path} is not supported for this schema")
        return negated

    def _conditional(self, schema: dict[str, Any], pointer: str, depth: int) -> Schema:
        if "then" not in schema and "else" not in schema:
            return True
        condition, then, otherwise = (
            self._schema(schema.get(keyword, True), f"{pointer}/{keyword}", depth + 1)
            for keyword in ("if", "then", "else")
        )
        return any_of([all_of([condition, then]), all_of([self._negate(condition, f"{pointer}/if"), otherwise])])

    def _dependency(self, name: str, requirement: Any, inner: Callable[[Any], Schema], path: str) -> Schema:
        without_name = {"properties": {name: False}}
        if isinstance(requirement, str):
            requirement = [requirement]
        if isinstance(requirement, list):
            names = self._checked(requirement, _is_name_list(requirement), path)
            return any_of([without_name, {"type": "object", "required": list(dict.fromkeys([name, *names]))}])
        return any_of([without_name, all_of([{"type": "object", "required": [name]}, inner(requirement)])])

    def _property_names(self, names: Schema, path: str) -> Schema:
        if isinstance(names, bool):
            return True if names else {"maxProperties": 0}
        values, pattern = self._name_set(names, path)
        if values is not None:
            return {"properties": dict.fromkeys(values, True), "additionalProperties": False}
        return True if pattern is None else {"patternProperties": {pattern: True}, "additionalProperties": False}

    def _name_set(self, names: Schema, path: str) -> tuple[list[str] | None, str | None]:
        # Returns a list of the allowed names, or a pattern for them. Both are None if all names are allowed.
        target = self._follow_references(names)
        constraints = {key: value for key, value in target.items() if key != "type"}
        if "string" not in target.get("type", "string"):
            return [], None
        if constraints.keys() in ({"enum"}, {"const"}):
            values = constraints.get("enum", [constraints.get("const")])
            return [value for value in values if isinstance(value, str)], None
        if constraints.keys() == {"pattern"}:
            return None, constraints["pattern"]
        if constraints and constraints.keys() <= {"minLength", "maxLength"}:
            return None, f"^[\\s\\S]{{{constraints.get('minLength', 0)},{constraints.get('maxLength', '')}}}$"
        if constraints:
            raise self._refusal(f"the schema's keyword {path} is not supported with {', '.join(sorted(constraints))}")
        return None, None

    def _follow_references(self, schema: Schema) -> dict[str, Any]:
        # A circular reference is treated as a schema that no value matches.
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                return schema if isinstance(schema, dict) else {} if schema else {"type": []}
            schema = self._definition(schema["$ref"]) or False
        return {"type": []}

    def _contains(self, schema: dict[str, Any], item: Schema, pointer: str) -> Schema:
        if "maxContains" in schema:
            raise self._refusal(f"the schema's keyword {pointer}/maxContains is not supported")
        found = self._value(schema, "minContains", schema.get("minContains", 1), f"{pointer}/minContains")
        least = found["minContains"]
        self._count_steps(least)
        return True if least <= 0 else array_containing(item, least)

    def _unevaluated(self, schema: dict[str, Any], rest: Schema, path: str, depth: int) -> Schema:
        if "additionalProperties" in schema:
            return True
        if rest is True:
            return {"additionalProperties": True}
        branches = self._limited_cases(self._evaluated(schema, path, depth, is_own=True), path)
        closed = (
            (
                {} if _ANY_NAME in names.get("patternProperties", {}) else {**names, "additionalProperties": rest},
                constraint,
            )
            for names, constraint in branches
        )
        return any_of(all_of(each) for each in closed)

    def _limited_cases(self, found: Iterator[_Case], path: str) -> list[_Case]:
        # The number of cases is checked at each level of nesting, before the enclosing level is computed.
        cases = list(itertools.islice(found, MAX_OPTIONS + 1))
        if len(cases) > MAX_OPTIONS:
            raise self._refusal(f"the schema's keyword {path} has more than {MAX_OPTIONS} cases")
        return cases

    def _evaluated(self, schema: Any, path: str, depth: int, *, is_own: bool = False) -> Iterator[_Case]:
        # is_own: whether the keyword at `path` is in `schema` itself, not in a schema that contains or refers to
        # `schema`.
        # Branches are rewritten at the current depth, because they may contain this keyword again. Pointers are
        # shortened, because they would grow with the depth.
        self._count_steps()
        if depth > MAX_DEPTH:
            raise self._refusal(f"the schema's keyword {path} has a circular reference, or is nested too deeply")
        own: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
        parts: list[list[_Case]] = []
        for keyword, value in schema.items() if isinstance(schema, dict) else ():
            if keyword in NAMED:
                declared = _as_list(value)
                if keyword == "patternProperties":
                    declared = [self._convert_pattern(library_pattern, name, f"{path}/{name}") for name in declared]
                own[keyword].update(dict.fromkeys(declared, True))
            elif keyword in ("additionalProperties", "unevaluatedProperties") and not is_own:
                own["patternProperties"][_ANY_NAME] = True
            elif keyword == "allOf":
                parts += (self._limited_cases(self._evaluated(each, path, depth + 1), path) for each in _as_list(value))
            elif keyword in ("anyOf", "oneOf"):
                cases = (
                    (names, all_of([self._schema(each, path[:SHOWN_CHARACTERS], depth), constraint]))
                    for each in _as_list(value)
                    for names, constraint in self._evaluated(each, path, depth + 1)
                )
                parts.append(self._limited_cases(cases, path))
            elif keyword == "$ref":
                parts.append(
                    self._limited_cases(self._evaluated(self._references.target(schema, path), path, depth + 1), path)
                )
            elif keyword in ("if", "dependentSchemas", "dependencies"):
                raise self._refusal(f"the schema's keyword {path} is not supported together with {keyword}")
        for chosen in itertools.product(*parts):
            merged = {key: dict(names) for key, names in own.items()}
            for names, _ in chosen:
                for key in merged:
                    merged[key].update(names.get(key, {}))
            self._count_steps(1 + sum(map(len, merged.values())))
            yield {key: names for key, names in merged.items() if names}, all_of(constraint for _, constraint in chosen)

    def _one_of(self, options: list[Schema], path: str) -> Schema:
        excluded = self._negation.exclusions(options, is_exact=True)
        if excluded is None:
            self._overlapping[id(options)] = path
            return {"oneOf": options}  # the options may no longer overlap after ObjectCloser has closed them
        return any_of(all_of([option, *more]) for option, more in zip(options, excluded, strict=True))

    def _overlap_error(self, options: list[Schema]) -> InvalidRequestError:
        path = self._overlapping[id(options)]
        return self._refusal(
            f"several options of {path} may match the same value, which cannot be prevented; use anyOf"
        )

    def _require_min_properties(self, rewritten: dict[str, Any], pointer: str) -> Iterator[Schema]:
        # Replaces `minProperties` with required names, because the library would count a repeated name twice.
        least = rewritten.get("minProperties", 0)
        names = rewritten.get("properties", {})
        required = set(rewritten.get("required", ()))
        optional = [name for name, schema in names.items() if schema is not False and name not in required]
        more = least - len(required)
        if more <= 0:
            rewritten.pop("minProperties", None)
        elif least > 1 or optional:
            del rewritten["minProperties"]
            if more > len(optional) and least > 1:
                raise self._refusal(f"{pointer}/minProperties above the number of declared properties is not supported")
            if _combinations(len(optional), more) > MAX_OPTIONS:
                raise self._refusal(
                    f"{pointer}/minProperties would require more than {MAX_OPTIONS} alternatives; use required"
                )
            objects: list[dict[str, Any]] = [
                {"type": "object", "required": list(chosen)} for chosen in itertools.combinations(optional, more)
            ]
            if least == 1:  # each object excludes the names required by earlier ones, so that a value matches only one
                for number, each in enumerate(objects):
                    each["properties"] = dict.fromkeys(optional[:number], False)
                objects.append({"type": "object", "properties": dict.fromkeys(optional, False), "minProperties": 1})
            yield any_of([all_types_except(["object"]), *objects])

    def _unique_items(self, schema: dict[str, Any], rewritten: dict[str, Any], pointer: str) -> Iterator[Schema]:
        most = rewritten.get("maxItems", math.inf)
        if schema.get("uniqueItems") is True and most > 1 and not self._are_items_disjoint(rewritten):
            values = (
                enumerate_values(self._follow_references(rewritten.get("items", True)))
                if "prefixItems" not in rewritten
                else None
            )
            arrays = None if values is None else distinct_arrays(values, rewritten.get("minItems", 0), most)
            if arrays is None:
                raise self._refusal(
                    f"the schema's keyword {pointer}/uniqueItems is supported only if the items can have only a few "
                    "scalar values, or if no two items can be equal"
                )
            yield arrays

    def _are_items_disjoint(self, rewritten: dict[str, Any]) -> bool:
        first = rewritten.get("prefixItems", [])
        rest = rewritten.get("maxItems", math.inf) - len(first) if rewritten.get("items", True) is not False else 0
        if not first or rest > 1:
            return False
        items = [*first, rewritten.get("items", True)] if rest == 1 else first
        return all(self._negation.are_disjoint(one, other) for one, other in itertools.combinations(items, 2))

    def _count_steps(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise self._refusal("the schema would take too long to enforce: it has too many combinations")


def _scalars(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
        else:
            yield each


def _is_exact(number: int) -> bool:
    # The library reads numbers as doubles. It writes doubles below 2**63 exactly, but larger doubles with the fewest
    # digits that identify them, followed by zeros. It crashes at -(2**63).
    if abs(number) < 2**63:
        return number == min(int(float(number)), 2**63 - 1)
    return abs(number) < 2**1023 and number == Decimal(repr(float(number)))


def _is_name_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _as_list(value: object) -> list[Any]:
    # The schema is not validated yet, so the value may have any type.
    return list(value) if isinstance(value, list | dict) else []
