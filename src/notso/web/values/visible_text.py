"""Text of others as a person can judge it: what steers, hides or is not seen is spelled out."""

from __future__ import annotations

import re

_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
"""Printable by their category, and nothing is drawn for them: Unicode's Default_Ignorable_Code_Point, and blanks."""


def is_visible(character: str) -> bool:
    """Whether something is drawn for it, in its place: no control, bidirectional, zero-width or tag character."""
    return character.isprintable() and not _IGNORABLE.match(character)


def visible(text: str) -> str:
    """With each other character as its number, such as \\u{202e}; lines stay lines."""
    return "".join(each if each == "\n" or is_visible(each) else f"\\u{{{ord(each):x}}}" for each in text)


def visible_line(text: str, characters: int) -> str:
    """So much of a text as one line, with a space in place of each such character."""
    text = text[: 2 * characters]
    return " ".join("".join(each if is_visible(each) else " " for each in text).split())[:characters]
