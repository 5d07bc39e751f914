"""Strings of the pages in the language of the current request: one table per language in ../languages.

The English table is complete together with the labels of sampling parameters, which stand with them. A key that
another table lacks falls back to English, and so do the strings read by the model, which are never translated. Code in
another thread sees the request's language only in a copy of its context.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from notso.smollm3 import PARAMETERS

LANGUAGES: dict[str, str] = {
    "en": "English",
    "fr": "Français",
    "es": "Español",
    "de": "Deutsch",
    "it": "Italiano",
    "pt": "Português",
}
"""Language codes and native names of the languages SmolLM3 was trained for."""

SEPARATORS: dict[str, tuple[str, str]] = {
    "en": (",", "."),
    "fr": ("\u202f", ","),
    "es": (".", ","),
    "de": (".", ","),
    "it": (".", ","),
    "pt": (".", ","),
}
"""Thousands separator and decimal mark."""

FOR_THE_MODEL = "tool_says_"
"""Prefix of strings that the model reads, which are never translated."""

language: ContextVar[str] = ContextVar("language", default="en")
"""Language of the current request, a key of LANGUAGES."""

FOLDER = Path(__file__).parents[1] / "languages"


@cache
def table(code: str) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads((FOLDER / f"{code}.toml").read_text("utf-8"))
    return found | (_of_parameters() if code == "en" else {})


def _of_parameters() -> dict[str, str]:
    pages = {name: each.page for name, each in PARAMETERS.items() if each.page is not None}
    labels = {f"set_{name}": page.label for name, page in pages.items()}
    hints = {f"set_{name}_hint": page.hint for name, page in pages.items()}
    return labels | hints | {f"unset_{name}": page.unset for name, page in pages.items() if page.unset}


class _Words(Mapping[str, str]):
    def __getitem__(self, name: str) -> str:
        found = table(language.get()).get(name)
        return table("en")[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(table("en"))

    def __len__(self) -> int:
        return len(table("en"))


words: Mapping[str, str] = _Words()


def missing(code: str) -> list[str]:
    """Return the strings of the pages that a language lacks; they are shown in English."""
    return [name for name in table("en") if name not in table(code) and not name.startswith(FOR_THE_MODEL)]


def localised(figure: str) -> str:
    """Convert '1,234.5' to the current language's separators, such as '1.234,5'."""
    return figure.translate(str.maketrans(",.", "".join(SEPARATORS[language.get()])))


def number(value: float, decimals: int = 0) -> str:
    """Format a number with separators in the current language."""
    return localised(f"{value:,.{decimals}f}")


def ordinal(number: int) -> str:
    """Return an ordinal: 4th in English, 4. in German, and the plain number in other languages."""
    if language.get() != "en":
        return f"{number}." if language.get() == "de" else str(number)
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def chosen_language(wanted: str, accepted: str) -> str:
    """Return the chosen language, the best of Accept-Language, or English."""
    if wanted in LANGUAGES:
        return wanted
    ranked: list[tuple[float, int, str]] = []
    for part in accepted[:500].split(","):
        name, _, weight = part.strip().partition(";q=")
        code = name[:2].lower()
        if code in LANGUAGES and name[2:3] in ("", "-"):
            ranked.append((-_weight(weight), len(ranked), code))
    return min(ranked)[2] if ranked else "en"


def _weight(text: str) -> float:
    try:
        return float(text) if text else 1.0
    except ValueError:
        return 0.0
