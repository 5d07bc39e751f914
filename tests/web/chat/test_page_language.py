"""Pages, their updates and error messages use the reader's language; API responses are always in English."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from typing import Any

from scripted_engine import ScriptedEngine, say

from notso.smollm3 import EngineError, Sentence
from notso.web.values.ids import new_id
from notso.web.values.wording import LANGUAGES, language_table

Start = Callable[..., Any]
FRENCH = {"Accept-Language": "fr-CA,fr;q=0.8"}
CODE = "```html\n<b>x</b>\n```\n"


def spoken(page: str) -> set[str]:
    """Return the languages whose labels appear on the page."""
    return {
        code
        for code in LANGUAGES
        if f">{language_table(code)['new_chat']}<" in page or language_table(code)["skip"] in page
    }


def test_page_uses_browser_language_or_selected_language(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say(CODE))).ready()
    for code in LANGUAGES:
        page = server.client.get("/", headers={"Accept-Language": code}).text
        assert spoken(page) == {code} and f'<html lang="{code}"' in page
    answer = server.client.post("/language", data={"language": "it"}, headers=FRENCH)
    assert answer.status_code == 303
    assert spoken(server.client.get("/", headers=FRENCH).text) == {"it"}
    assert 'value="it" lang="it" selected' in server.client.get("/settings", headers=FRENCH).text
    server.client.post("/language", data={"language": ""})
    assert spoken(server.client.get("/", headers=FRENCH).text) == {"fr"}
    refused = server.client.post("/language", data={"language": "klingon"}, headers=FRENCH)
    assert refused.status_code == 400 and language_table("fr")["error_form"] in unescape(refused.text)
    assert server.client.get("/", headers={"Cookie": "notso-language=[];;=,", **FRENCH}).status_code == 200
    others = 'seen[1]=yes; view={"wide": true}; '  # of other servers on this machine
    assert spoken(server.client.get("/", headers={"Cookie": f"{others}notso-language=it", **FRENCH}).text) == {"it"}


def test_cached_answers_and_errors_use_the_readers_language(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say(CODE))).ready()
    asked = server.ask("hello")
    server.finished(asked)
    chat = f"/chats/{asked.chat_id}"
    for code in ("fr", "de", "en"):
        page = server.client.get(chat, headers={"Accept-Language": code}).text
        assert f'<button class="copy-code" type="button">{language_table(code)["code_copy"]}</button>' in page
        assert page.count('class="copy-code"') == 1
    missing = server.client.get("/chats/nothing", headers=FRENCH)
    assert missing.status_code == 404 and language_table("fr")["error_unknown_chat"] in unescape(missing.text)
    program = server.client.post("/v1/chat/completions", json={"messages": "no"}, headers=FRENCH)
    assert program.status_code == 400 and "messages" in program.json()["error"]["message"]
    export = server.client.get(f"{chat}/export/html", headers=FRENCH).text
    assert '<html lang="fr">' in export


def test_engine_errors_are_localized_on_pages_but_english_in_the_api(start: Start) -> None:
    english = "12,000 requests are already waiting"
    engine = ScriptedEngine(failure=EngineError(Sentence(english, "engine_many_waiting", limit=12_000)))
    server = start(engine).ready()
    asked = server.client.post("/chats", data={"text": "hello", "key": new_id()}, headers=FRENCH)
    chat = asked.headers["location"]
    said = language_table("fr")["failure_engine_many_waiting"].format(limit="12\u202f000")
    server._wait(lambda: said in unescape(server.client.get(chat, headers=FRENCH).text))
    assert english not in server.client.get(chat, headers=FRENCH).text
    body = {"messages": [{"role": "user", "content": "hello"}]}
    program = server.client.post("/v1/chat/completions", json=body, headers=FRENCH)
    assert program.json()["error"]["message"] == english
