"""Each translation matches the English table, falls back to it, and is selected by the request's language."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import notso
from notso.documents.values import UnreadableError, unreadable
from notso.smollm3 import PARAMETERS, ContextLengthError, EngineError, Sentence
from notso.web.chat.routes.transfer import ImportReport
from notso.web.chat.templates import human_duration, human_size
from notso.web.values import wording
from notso.web.values.slash_commands import SHORTCUTS, SLASH_COMMANDS
from notso.web.values.wording import (
    FAILURE,
    FOR_THE_MODEL,
    LANGUAGES,
    PLURALS,
    TWO_FORMS,
    direction,
    format_rate,
    language,
    language_table,
    missing_translations,
    number,
    ordinal,
    select_language,
    separators,
    translated,
    words,
)

OF_PARAMETERS = tuple(f"{kind}_{name}" for name in PARAMETERS for kind in ("set", "unset"))
SAME_EVERYWHERE = 60
"""Limit on strings equal to the English ones (names, units, shared words); more means an unfinished translation."""

OTHERS = sorted(set(LANGUAGES) - {"en"})


WITHOUT_SPACES = ("ja", "zh-Hans")
"""Languages with full-width commas and colons, which take no spaces."""


def holes(text: str) -> list[str]:
    return sorted(re.findall(r"\{[a-z_]+\}", text))


def plurals(text: str) -> list[str]:
    """Return the name and the plural forms of each number for which the string selects a form."""
    return re.findall(r"\{([a-z_]+):([^}]*)\}", text)


@pytest.mark.parametrize("code", OTHERS)
def test_translation_has_known_keys_and_same_placeholders(code: str) -> None:
    english = language_table("en")
    here = {name: text for name, text in language_table(code).items() if not name.startswith(FAILURE)}
    assert [name for name in here if name not in english or name.startswith(FOR_THE_MODEL)] == []
    ordered = [name for name in english if name in here and not name.startswith(OF_PARAMETERS)]
    assert [name for name in here if name in ordered] == ordered, "entries follow the order of the English table"
    assert {name: text for name, text in here.items() if holes(text) != holes(english[name])} == {}
    assert {name for name, text in here.items() if not text.strip() and english[name].strip()} == set()
    wide = "、，：（" if code in WITHOUT_SPACES else ""
    edges = [name for name, text in here.items() if text[-1:].isspace() != english[name][-1:].isspace()]
    assert [name for name in edges if here[name][-1:] not in wide] == []
    assert [name for name in here if english[name][:1] == " " and here[name][:1] not in {" ", ",", *wide}] == []
    same = [name for name, text in here.items() if text == english[name]]
    assert len(same) < SAME_EVERYWHERE, same


def test_pages_write_punctuation_and_direction_of_the_language() -> None:
    web = Path(wording.__file__).parents[1]
    fixed = re.compile(r"[}%]\}[,:] ?\{\{.*|[}%]\}\.(?:\s|<|$).*|<strong>\{\{ (?!words).*")
    found = {path.name: fixed.findall(path.read_text()) for path in web.glob("templates/*.html")}
    joined = re.compile(r"""\{words\[[^]]*\]\}[,:] |[,:] \{words\[.*""")
    found |= {path.name: joined.findall(path.read_text()) for path in web.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}, "use the words comma and colon, and dir"
    spoken = language.set("fr")
    try:
        assert f"{words['models_now']}{words['colon']}" == "Modèle chargé\u00a0: "
    finally:
        language.reset(spoken)


def test_lists_in_messages_have_commas_of_the_language() -> None:
    spoken = language.set("zh-Hans")
    try:
        assert "图片 1，文件 2" in ImportReport([], [], [], 0, {"pictures": 1, "files": 2}).sentence
    finally:
        language.reset(spoken)


ENGLISH = ("example_1", "example_2", "example_3")
"""Questions for the demo model, which knows only English."""
APOSTROPHE = r"(?<=[^\W\d])'(?=[^\W\d])"
WIDE = (
    r"[^ -~]\s?[(?]|\)\s?[^ -~]|:(?:\s|$)|～"
    r"|[A-Za-z\d}][\u3040-\u30ff\u4e00-\u9fff]|[\u3040-\u30ff\u4e00-\u9fff][A-Za-z\d{]"
)
UNUSUAL = {
    "fr": rf"{APOSTROPHE}|(?<!\u202f)[;!?](?:\s|$)|(?<!\u00a0):(?:\s|$)|\}}[^\u00a0]?%",
    "it": APOSTROPHE,
    "nl": APOSTROPHE,
    "de": r"\}[^\u00a0]?%",
    "es": r"\}[^\u00a0]?%",
    "ja": WIDE,
    "zh-Hans": WIDE,
    "ko": r"[^\W\d] \((?!\{cached)",
    "ar": r"[?,;]|(?<!/)\{(?:name|file|host|server|names|said|quote|reason|title(?!\} \(فرع))\}"
    r"|(?:\}|\d) (?:kB|MB|GB|MiB)|\{place\}:|\d-\d|--|`",
}
"""Patterns of punctuation that is not usual in a language. In Arabic text, names, sizes and dates
need an isolate."""
OTHER_TERMS = {
    "ar": "المطالبة|شيفرة|محرف",
    "de": "Chat-Template|Backup|Protokoll",
    "es": r"(?i)\bajustes\b",
    "fr": "jeton|[Ii]nvite système|conversations|[Rr]églages|modèle de chat",
    "it": "modello di chat|registro",
    "ja": "メモリー|取り込|文書",
    "ko": "응답[이의을]",
    "nl": "chattemplate|[Gg]rens van",
    "pl": "poleceni[ae] systemow|[Ss]treszcz|Cię|Tobie|Twoi",
    "pt": r"\bconversas?\b(?<!a conversa)|busca\b|[Tt]ent(?:e|ar) de novo",
    "zh-Hans": "词元|您|对话模板|对话数据库",
}
"""Patterns of words for which the language uses another word elsewhere, so that one thing has one name."""


@pytest.mark.parametrize("code", LANGUAGES)
def test_translation_has_usual_punctuation_and_one_term_for_each_thing(code: str) -> None:
    here = {name: text for name, text in language_table(code).items() if name not in ENGLISH}
    assert {name: text for name, text in here.items() if re.search(r"\.\.\.|\s…", text)} == {}
    marked = r"\{[a-z_]+:[^}]*\}|（:）|[\u2066\u2068][^\u2069]*\u2069"
    texts = {name: re.sub(marked, "", text) for name, text in here.items()}
    for pattern in (UNUSUAL.get(code), OTHER_TERMS.get(code)):
        assert pattern is None or {name: text for name, text in texts.items() if re.search(pattern, text)} == {}


def test_integers_durations_and_sizes_are_formatted_by_language() -> None:
    spoken = language.set("de")
    try:
        assert "12.345" in words["error_parts"].format(limit=12_345)
        assert words["import_newer"].format(version=7).count("7") == 1
        for code, expected in {"de": "1 min 15 s", "ja": "1 分 15 秒", "ko": "1분 15초", "ar": "1 د 15 ث"}.items():
            language.set(code)
            assert human_duration(75) == expected
            assert human_size(8).strip("\u2066\u2069") == "8 B"
    finally:
        language.reset(spoken)


@cache
def codes_of_errors() -> dict[str, set[str]]:
    """Return error code -> names of the values in its sentence, for every error in the sources."""
    found = {code: {"needed", "context"} for code in ("prompt_too_long", "prompt_too_long_at_least")}
    kinds = ("Sentence", "UnreadableError")
    texts = (path.read_text() for path in Path(notso.__file__).parent.rglob("*.py"))
    for text in (each for each in texts if any(kind in each for kind in kinds)):
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in kinds:
                continue
            if len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
                figures = {str(each.arg) for each in call.keywords}
                assert found.setdefault(call.args[1].value, figures) == figures, call.args[1].value
    return found


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_error_code_is_translated_with_its_values(code: str) -> None:
    codes = codes_of_errors()
    here = {name.removeprefix(FAILURE): text for name, text in language_table(code).items() if name.startswith(FAILURE)}
    assert here.keys() == (set() if code == "en" else codes.keys()), "English needs no entry: the source has it"
    assert {each: text for each, text in here.items() if not {hole[1:-1] for hole in holes(text)} <= codes[each]} == {}


def test_only_texts_with_error_code_are_translated() -> None:
    spoken = language.set("de")
    try:
        busy = EngineError(Sentence("12,000 requests are already waiting", "engine_many_waiting", limit=12_000))
        assert str(busy) == "12,000 requests are already waiting"
        assert translated(busy) == translated(busy.sentence) == "12.000 Anfragen warten bereits"
        assert "12.345" in translated(ContextLengthError(12_345, 4096))
        encrypted = UnreadableError("is encrypted", "document_encrypted")
        assert translated(unreadable(encrypted.stored())) == "es ist verschlüsselt"
        assert translated(unreadable("is of an older release")) == "is of an older release"
        assert translated(unreadable("[1]")) == "[1]"
        assert translated(EngineError("has no code")) == translated("has no code") == "has no code"
        assert translated(Sentence("of a newer release", "engine_of_tomorrow")) == "of a newer release"
        assert translated(Sentence("without its figure", "engine_many_waiting")) == "without its figure"
    finally:
        language.reset(spoken)


@pytest.mark.parametrize("code", OTHERS)
def test_missing_translations_fall_back_to_english_and_are_listed(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {name: text for name, text in language_table(code).items() if name != "chats"}
    monkeypatch.setattr(wording, "language_table", lambda each: lacking if each == code else language_table(each))
    assert "chats" in missing_translations(code)
    spoken = language.set(code)
    try:
        assert words["chats"] == language_table("en")["chats"]
    finally:
        language.reset(spoken)


@pytest.mark.parametrize("code", LANGUAGES)
def test_words_follow_the_current_language(code: str) -> None:
    spoken = language.set(code)
    try:
        assert words["chats"] == language_table(code)["chats"]
        assert words["tool_says_none"] == language_table("en")["tool_says_none"]
        assert all(command.does for command in SLASH_COMMANDS) and all(shortcut.does for shortcut in SHORTCUTS)
        group, point = separators(code)
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
        ("", "sv,pt-BR;q=0.8,en;q=0.5", "pt"),
        ("", "ja-JP", "ja"),
        ("", "zh-CN,zh;q=0.9", "zh-Hans"),
        ("", "zh-TW,zh-Hant;q=0.9,ko;q=0.5", "ko"),
        ("zh-Hans", "fr", "zh-Hans"),
        ("", "en;q=0.2,it;q=0.7", "it"),
        ("", "es;q=nonsense,en", "en"),
        ("", "de;q=0", "en"),
        ("", "de; q=0.9, fr;q=0.1", "de"),
        ("", "fr ;Q=0.1 , de ; level=1 ; q=0.9", "de"),
        ("", "*", "en"),
        ("", "den,frx", "en"),
        ("it", "fr", "it"),
        ("xx", "fr", "fr"),
        ("../en", "", "en"),
        ("", "fr," * 100_000, "fr"),
    ],
)
def test_chosen_language_takes_precedence_over_accept_language(chosen: str, accepted: str, expected: str) -> None:
    assert select_language(chosen, accepted) == expected


@pytest.mark.parametrize("code", LANGUAGES)
def test_each_number_has_all_plural_forms_of_the_language(code: str) -> None:
    count = PLURALS.get(code, TWO_FORMS)[0]
    wrong = {
        name: text
        for name, text in language_table(code).items()
        if any(len(forms.split("|")) != count or f"{{{each}}}" not in text for each, forms in plurals(text))
    }
    assert wrong == {}
    # A translation selects plural forms where English does, unless it avoids the noun; a few such strings must remain.
    assert count == 1 or sum(bool(plurals(text)) for text in language_table(code).values()) >= 6


@pytest.mark.parametrize(
    ("code", "count", "expected"),
    [
        ("en", 1, "1 token"),
        ("en", 0, "0 tokens"),
        ("en", 1000, "1,000 tokens"),
        ("de", 1234, "1.234 Token"),
        ("fr", 0, "0 token"),
        ("fr", 2, "2 tokens"),
        ("pl", 1, "1 token"),
        ("pl", 22, "22 tokeny"),
        ("pl", 12, "12 tokenów"),
        ("pl", 5, "5 tokenów"),
        ("ar", 2, "2 رمزان"),
        ("ar", 7, "7 رموز"),
        ("ar", 11, "11 رمزًا"),
        ("ar", 100, "100 رمز"),
        ("ja", 1, "1 トークン"),
        ("zh-Hans", 2, "2 个 token"),
    ],
)
def test_a_noun_agrees_with_its_number(code: str, count: int, expected: str) -> None:
    spoken = language.set(code)
    try:
        assert words["stat_tokens"].format(tokens=number(count)) == expected
        assert str(number(count)) in words["earlier"].format(count=number(count))
    finally:
        language.reset(spoken)


def test_english_fallback_uses_english_plural_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {name: text for name, text in language_table("fr").items() if name != "stat_tokens"}
    monkeypatch.setattr(wording, "language_table", lambda each: lacking if each == "fr" else language_table(each))
    spoken = language.set("fr")
    try:
        assert words["stat_tokens"].format(tokens=number(0)) == "0 tokens"
    finally:
        language.reset(spoken)


def test_rate_has_decimal_only_if_small() -> None:
    assert (format_rate(9.87), format_rate(83678.5)) == ("9.9", "83,678")


@pytest.mark.parametrize("code", LANGUAGES)
def test_page_direction_follows_language(code: str) -> None:
    spoken = language.set(code)
    try:
        assert direction() == ("rtl" if code == "ar" else "ltr")
    finally:
        language.reset(spoken)
