"""Every word the pages say, in the language of whoever asks: a table in ../languages for each.

English is whole, and what another table lacks is said in English: that is only what the model reads, which is English
always. Work in another thread speaks the language of its request where it runs in a copy of its context.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path

LANGUAGES: dict[str, str] = {
    "en": "English",
    "fr": "Français",
    "es": "Español",
    "de": "Deutsch",
    "it": "Italiano",
    "pt": "Português",
}
"""The languages SmolLM3 was trained for, each by its own name."""

SEPARATORS: dict[str, tuple[str, str]] = {
    "en": (",", "."),
    "fr": ("\u202f", ","),
    "es": (".", ","),
    "de": (".", ","),
    "it": (".", ","),
    "pt": (".", ","),
}
"""Between thousands, and before what is less than one."""

language: ContextVar[str] = ContextVar("language", default="en")
"""A key of LANGUAGES: that of the request that is being answered."""

FOLDER = Path(__file__).parents[1] / "languages"


@cache
def table(code: str) -> dict[str, str]:
    """The words of one language."""
    return tomllib.loads((FOLDER / f"{code}.toml").read_text("utf-8"))


class _Words(Mapping[str, str]):
    def __getitem__(self, name: str) -> str:
        found = table(language.get()).get(name)
        return table("en")[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(table("en"))

    def __len__(self) -> int:
        return len(table("en"))


words: Mapping[str, str] = _Words()


def localised(figure: str) -> str:
    """A number as Python writes it, '1,234.5', with the separators of the language: '1.234,5' in German."""
    return figure.translate(str.maketrans(",.", "".join(SEPARATORS[language.get()])))


def number(value: float, decimals: int = 0) -> str:
    """With its thousands apart and so many digits after the point, as the language writes it."""
    return localised(f"{value:,.{decimals}f}")


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th ... in English, 4. in German, and elsewhere the number, as their sentences have it."""
    if language.get() != "en":
        return f"{number}." if language.get() == "de" else str(number)
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def chosen_language(wanted: str, accepted: str) -> str:
    """The language that was chosen, or else the first of an Accept-Language header that there is a table for."""
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
