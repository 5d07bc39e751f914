"""Each translation matches the English table, falls back to it, and is selected by the request's language."""

from __future__ import annotations

import re

import pytest

from notso.smollm3 import PARAMETERS
from notso.web.values import wording
from notso.web.values.shortcuts import SHORTCUTS
from notso.web.values.slash_commands import SLASH_COMMANDS
from notso.web.values.wording import (
    FOR_THE_MODEL,
    LANGUAGES,
    SEPARATORS,
    chosen_language,
    language,
    missing,
    number,
    ordinal,
    table,
    words,
)

OF_PARAMETERS = tuple(f"{kind}_{name}" for name in PARAMETERS for kind in ("set", "unset"))
SAME_EVERYWHERE = 60
"""Limit on strings equal to the English ones (names, units, shared words); more means an unfinished translation."""

OTHERS = sorted(set(LANGUAGES) - {"en"})


def holes(text: str) -> list[str]:
    return sorted(re.findall(r"\{[a-z_]+\}", text))


@pytest.mark.parametrize("code", OTHERS)
def test_a_table_has_known_keys_and_the_same_placeholders(code: str) -> None:
    here, english = table(code), table("en")
    assert [name for name in here if name not in english or name.startswith(FOR_THE_MODEL)] == []
    ordered = [name for name in english if name in here and not name.startswith(OF_PARAMETERS)]
    assert [name for name in here if name in ordered] == ordered, "in the order of the English table"
    assert {name: text for name, text in here.items() if holes(text) != holes(english[name])} == {}
    assert {name for name, text in here.items() if not text.strip() and english[name].strip()} == set()
    edges = [name for name, text in here.items() if text[-1:].isspace() != english[name][-1:].isspace()]
    assert edges == [] and [name for name in here if english[name][:1] == " " != here[name][:1]] == []
    same = [name for name, text in here.items() if text == english[name]]
    assert len(same) < SAME_EVERYWHERE, same


@pytest.mark.parametrize("code", OTHERS)
def test_missing_translations_fall_back_to_english_and_are_listed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {name: text for name, text in table(code).items() if name != "chats"}
    monkeypatch.setattr(wording, "table", lambda each: lacking if each == code else table(each))
    assert "chats" in missing(code)
    spoken = language.set(code)
    try:
        assert words["chats"] == table("en")["chats"]
    finally:
        language.reset(spoken)


@pytest.mark.parametrize("code", LANGUAGES)
def test_words_follow_the_current_language(code: str) -> None:
    spoken = language.set(code)
    try:
        assert words["chats"] == table(code)["chats"]
        assert words["tool_says_none"] == table("en")["tool_says_none"]
        assert all(command.does for command in SLASH_COMMANDS) and all(shortcut.does for shortcut in SHORTCUTS)
        group, point = SEPARATORS[code]
        assert number(1234567.25, 1) == f"1{group}234{group}567{point}2" and number(12) == "12"
        assert ordinal(2) == {"en": "2nd", "de": "2."}.get(code, "2")
    finally:
        language.reset(spoken)


@pytest.mark.parametrize(
    ("chosen", "accepted", "expected"),
    [
        ("", "", "en"),
        ("", "fr", "fr"),
        ("", "de-AT,de;q=0.9,en;q=0.8", "de"),
        ("", "ja,pt-BR;q=0.8,en;q=0.5", "pt"),
        ("", "en;q=0.2,it;q=0.7", "it"),
        ("", "es;q=nonsense,en", "en"),
        ("", "*", "en"),
        ("", "den,frx", "en"),
        ("it", "fr", "it"),
        ("xx", "fr", "fr"),
        ("../en", "", "en"),
        ("", "fr," * 100_000, "fr"),
    ],
)
def test_the_chosen_language_counts_then_the_browsers(chosen: str, accepted: str, expected: str) -> None:
    assert chosen_language(chosen, accepted) == expected
