"""Strict JSON parsing of untrusted bodies."""

from __future__ import annotations

import codecs
import json
import math
import re
from functools import partial
from typing import Any, NoReturn

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.text_file import NotTextError, decode_text
from notso.web.edge.api_error import ApiError

MAX_DEPTH = 64
LIMITS = JsonLimits(MAX_DEPTH, objects=1 << 16, values=(1 << 18) + (1 << 12))
"""Enough for schemas with thousands of properties, and for the token ids of /detokenize."""

_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LARGEST_INTEGER = 2**64 - 1  # seeds may be unsigned
_MAX_INTEGER_DIGITS = 20
_SUSPECT_ESCAPE = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")
_UNFIT = re.compile("[\x00\ud800-\udfff]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in linear time.

    Raises ApiError (400) for other values, NaN, infinities, integers beyond 64 bits, duplicate keys, more than LIMITS,
    and text with NUL or lone surrogates.
    """
    if body.startswith(_MARKS) or b"\0" in body[:4] or body.endswith(b"\0"):
        body = _as_utf8(body)
    try:
        check_shape(body, LIMITS)
        value = _DECODER.decode(body.decode("utf-8"))
    except JsonShapeError as error:
        raise _refusal(f"the body is {error}" if "nested" in str(error) else f"the body has {error}") from None
    except UnicodeDecodeError:
        raise _refusal("the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _refusal(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _refusal(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise _refusal("the body must be a JSON object")
    if _SUSPECT_ESCAPE.search(body) or b"\x00" in body:
        _check_texts(value)
    return value


def _as_utf8(body: bytes) -> bytes:
    """Return a body as UTF-8 that a client sent in UTF-16 or UTF-32, with a byte order mark, or with its final NUL."""
    try:
        return decode_text(body).encode()
    except NotTextError as error:
        raise _refusal(f"the body {error}") from None


def _check_texts(value: object) -> None:
    if isinstance(value, str) and _UNFIT.search(value):
        raise ApiError(400, "invalid_text", "a text in the body contains a NUL or a lone surrogate")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key)
            _check_texts(item)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _refusal("an object has a duplicate key")
    return members


def _integer(text: str) -> int:
    if len(text) > _MAX_INTEGER_DIGITS or not -(2**63) <= (value := int(text)) <= _LARGEST_INTEGER:
        raise _refusal("an integer is outside 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _refusal("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise _refusal(f"{name} is not JSON")


_refusal = partial(ApiError, 400, "invalid_json")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_int=_integer, parse_float=_number, parse_constant=_constant)
