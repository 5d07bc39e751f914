"""Make untrusted text safe to display: escape or replace control and invisible characters."""

from __future__ import annotations

import re

# Characters that are printable by category but invisible: Default_Ignorable_Code_Point, and blanks.
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)


def is_visible(character: str) -> bool:
    """Return whether a character is visible, unlike control, bidirectional, zero-width and tag characters."""
    return character.isprintable() and not _IGNORABLE.match(character)


def visible(text: str) -> str:
    """Escape invisible characters, as in \\u{202e}; keep newlines."""
    # Checking each distinct character only once is much faster for long texts.
    hidden = {ord(each) for each in set(text) if each != "\n" and not is_visible(each)}
    return text.translate({each: f"\\u{{{each:x}}}" for each in hidden}) if hidden else text


def sanitize_line(text: str, characters: int) -> str:
    """Return `text` as one line of at most `characters` characters. Invisible characters become spaces."""
    text = text[: 2 * characters]
    return " ".join("".join(each if is_visible(each) else " " for each in text).split())[:characters]
