"""Look up strings of the pages in the language of the current request, in one table per language (../languages).

Labels of sampling parameters are defined with the parameters and added to the English table. A string that a table
lacks is shown in English. Strings that the model reads are always English. Code in another thread sees the
request's language only if it runs in a copy of the request's context.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from notso.smollm3 import PARAMETERS

LANGUAGES: dict[str, str] = {
    "en": "English",
    "fr": "Français",
    "es": "Español",
    "de": "Deutsch",
    "it": "Italiano",
    "pt": "Português (Brasil)",
    "nl": "Nederlands",
    "pl": "Polski",
    "ar": "العربية",
    "ja": "日本語",
    "ko": "한국어",
    "zh-Hans": "简体中文",
}
"""Language codes and native names. SmolLM3 natively supports the first six."""

SEPARATORS: dict[str, tuple[str, str]] = {
    "en": (",", "."),
    "fr": ("\u202f", ","),
    "es": (".", ","),
    "de": (".", ","),
    "it": (".", ","),
    "pt": (".", ","),
    "nl": (".", ","),
    "pl": ("\u00a0", ","),
}
"""Thousands separator and decimal mark by language; default: English."""

RIGHT_TO_LEFT = frozenset({"ar"})

FAILURE = "failure_"
"""Key prefix of translated error messages; the error's `code` follows. English messages are defined where the
errors are raised."""

FOR_THE_MODEL = "tool_says_"
"""Key prefix of strings that the model reads. They are never translated."""

language: ContextVar[str] = ContextVar("language", default="en")
"""Language of the current request, a key of LANGUAGES."""

FOLDER = Path(__file__).parents[1] / "languages"


UNITS: dict[str, tuple[str, ...]] = {
    "en": ("bytes", "kB", "MB", "GB"),
    "fr": ("octets", "ko", "Mo", "Go"),
}
"""Units of sizes by language; default: SYMBOLS."""
SYMBOLS = ("B", "kB", "MB", "GB")

DURATION_UNITS: dict[str, tuple[str, str, str]] = {
    "en": (" h", " min", " s"),
    "ar": (" س", " د", " ث"),
    "ja": (" 時間", " 分", " 秒"),
    "ko": ("시간", "분", "초"),
    "zh-Hans": (" 小时", " 分", " 秒"),
}
"""Units of hours, minutes and seconds by language, with the space before them; default: English."""


def separators(code: str) -> tuple[str, str]:
    return SEPARATORS.get(code, SEPARATORS["en"])


PLURALS: dict[str, tuple[int, Callable[[int], int]]] = {
    "fr": (2, lambda n: n > 1),
    "pt": (2, lambda n: n > 1),
    "pl": (3, lambda n: 0 if n == 1 else 1 if 2 <= n % 10 <= 4 and not 12 <= n % 100 <= 14 else 2),
    "ar": (6, lambda n: n if n < 3 else 3 if 3 <= n % 100 <= 10 else 4 if n % 100 >= 11 else 5),
    "ja": (1, lambda n: 0),
    "ko": (1, lambda n: 0),
    "zh-Hans": (1, lambda n: 0),
}
"""Plural rules for integers by language, based on CLDR: the number of forms, and a function that returns n's form."""
TWO_FORMS: tuple[int, Callable[[int], int]] = (2, lambda n: n != 1)


class FormattedNumber(str):
    """A formatted number with its value, which selects plural forms."""

    value: float

    def __new__(cls, text: str, value: float) -> FormattedNumber:
        formatted = super().__new__(cls, text)
        formatted.value = value
        return formatted


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" not in format_spec:
            is_plain_number = isinstance(value, int) and not format_spec
            return number(value) if is_plain_number else str(super().format_field(value, format_spec))
        count = value.value if isinstance(value, FormattedNumber) else value
        forms = format_spec.split("|")
        return forms[int(PLURALS.get(language.get(), TWO_FORMS)[1](abs(int(count))))]


_FORMATTER = _Formatter()


class PluralString(str):
    """A string of the pages. `{count:token|tokens}` selects the form of a word for the number `count`.

    Integers are formatted with separators of the language.
    """

    __slots__ = ()

    def format(self, *args: object, **values: object) -> str:
        return _FORMATTER.vformat(self, args, values)


@cache
def language_table(code: str) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads((FOLDER / f"{code}.toml").read_text("utf-8"))
    return found | (_parameter_strings() if code == "en" else {})


def _parameter_strings() -> dict[str, str]:
    pages = {name: each.page for name, each in PARAMETERS.items() if each.page is not None}
    labels = {f"set_{name}": page.label for name, page in pages.items()}
    hints = {f"set_{name}_hint": page.hint for name, page in pages.items()}
    return labels | hints | {f"unset_{name}": page.unset for name, page in pages.items() if page.unset}


class _EnglishString(PluralString):
    __slots__ = ()

    def format(self, *args: object, **values: object) -> str:
        token = language.set("en")
        try:
            return super().format(*args, **values)
        finally:
            language.reset(token)


class _Translations(Mapping[str, str]):
    def __getitem__(self, name: str) -> str:
        found = language_table(language.get()).get(name)
        # Plural forms in an English string must be chosen by English rules.
        return PluralString(found) if found is not None else _EnglishString(language_table("en")[name])

    def __iter__(self) -> Iterator[str]:
        return iter(language_table("en"))

    def __len__(self) -> int:
        return len(language_table("en"))


words: Mapping[str, str] = _Translations()


def missing_translations(code: str) -> list[str]:
    """Return the keys of the strings that a language lacks."""
    names = {name: name for other in LANGUAGES for name in language_table(other)}
    return [
        name
        for name in names
        if code != "en" and name not in language_table(code) and not name.startswith(FOR_THE_MODEL)
    ]


def translated(error: object) -> str:
    """Return an error's message in the current language, or else in English."""
    error = getattr(error, "sentence", error)
    code = getattr(error, "code", "")
    phrase = language_table(language.get()).get(f"{FAILURE}{code}") if code else None
    if phrase is None:
        return str(error)
    try:
        return PluralString(phrase).format(**getattr(error, "values", {}))
    except KeyError:  # errors from child processes, and from replicas of another release, may lack a value
        return str(error)


def localize_number(figure: str) -> str:
    """Convert '1,234.5' to the current language's separators, such as '1.234,5'."""
    return figure.translate(str.maketrans(",.", "".join(separators(language.get()))))


def number(value: float, decimals: int = 0) -> str:
    """Format a number with the current language's separators."""
    return FormattedNumber(localize_number(f"{value:,.{decimals}f}"), value)


def format_rate(per_second: float) -> str:
    """Format a rate, with one decimal place if it is below 100."""
    return number(per_second, 1 if per_second < 100 else 0)


def isolate_direction(figure: object) -> str:
    """Isolate a path, or a figure and its unit, from the direction of surrounding right-to-left text."""
    return f"\u2066{figure}\u2069" if language.get() in RIGHT_TO_LEFT else str(figure)


def direction() -> str:
    return "rtl" if language.get() in RIGHT_TO_LEFT else "ltr"


def ordinal(number: int) -> str:
    """Return an ordinal: 4th in English, 4. in German, and the plain number in other languages."""
    if language.get() != "en":
        return f"{number}." if language.get() == "de" else str(number)
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def select_language(chosen: str, accepted: str) -> str:
    """Return the language chosen by the user, or else the best match of Accept-Language, or else English."""
    if chosen in LANGUAGES:
        return chosen
    ranked: list[tuple[float, int, str]] = []
    for part in accepted[:500].split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        code, weight = _code_of(name), _weight(parameters)
        if code and weight > 0:
            ranked.append((-weight, len(ranked), code))
    return min(ranked)[2] if ranked else "en"


def _code_of(tag: str) -> str:
    main, _, rest = tag.partition("-")
    if main == "zh":
        return "" if rest.split("-")[0] in ("hant", "tw", "hk", "mo") else "zh-Hans"
    return main if main in LANGUAGES else ""


def _weight(parameters: Sequence[str]) -> float:
    weight = next((each.removeprefix("q=") for each in parameters if each.startswith("q=")), "1")
    try:
        return float(weight)
    except ValueError:
        return 0.0
