"""Keywords of JSON schemas: supported by the library, rewritten, or annotations."""

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
"""Passed to the library unchanged."""

REWRITTEN = frozenset(
    (
        *("$ref", "format", "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
    )
)
"""Rewritten in the library's keywords if possible."""

SILENT = frozenset(("then", "else", "minContains", "maxContains", "additionalItems"))
"""Used only by the keywords next to them."""

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Annotations, which do not constrain values."""

REFUSED = frozenset(("$dynamicRef", "$recursiveRef"))
"""Constraints that are not supported."""

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
"""The enforced formats, in the library's keywords; any other is an annotation, as in the standard.

Dates and times follow RFC 3339, without leap seconds and the year 0 (the library itself would allow February 29 in any
year). Host names have no two adjacent hyphens, which would begin an encoded label.
"""

MAX_PATTERN_PROPERTIES = 32
"""Per object: the library intersects their patterns with each other."""
