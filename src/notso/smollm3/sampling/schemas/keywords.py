"""The keywords of JSON schemas: which the library holds, which are rewritten into those, which only describe."""

from __future__ import annotations

from typing import Any

ONE = ("items", "additionalProperties")
MANY = ("anyOf", "allOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties")
"""Keywords whose value is a schema, a list of them, or a mapping to them."""

VALUES = frozenset(
    (
        *("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
"""Go to the library as they are."""

REWRITTEN = frozenset(
    (
        *("$ref", "format", "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
    )
)
"""Said in the library's keywords, where that can be done."""

SILENT = frozenset(("then", "else", "minContains", "maxContains", "additionalItems"))
"""Ask for nothing alone; what they stand beside reads them."""

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Say nothing about which values are valid."""

REFUSED = frozenset(("$dynamicRef", "$recursiveRef"))
"""Say something about which values are valid, and are not held."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"format": "hostname", "pattern": "^(?:-?[a-zA-Z0-9.])+$", "maxLength": 253},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}
"""The formats that are held, in the library's keywords; any other is an annotation, as the standard has it.

Dates and times are RFC 3339's, without leap seconds and the year 0 (the library would take a 29th of February of any
year); names of hosts have no two hyphens in a row, as the encoded ones have that would have to be decoded.
"""

MAX_PATTERN_PROPERTIES = 32
"""In one object: the library combines their patterns with one another."""
