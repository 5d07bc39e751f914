"""Plugin features on the page, and the operator's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect
from plugins.installed_plugins import running

from notso.plugins.process import Plugins
from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.sign_in import SignInSettings
from notso.web.values.wording import words

pytestmark = pytest.mark.browser
Open = Callable[..., Page]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugins]:
    with running(tmp_path, monkeypatch, "kind", "raises") as plugins:
        yield plugins


def test_plugin_command_is_offered_and_its_result_is_shown(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, plugins: Plugins
) -> None:
    page = open_page(serve(demo.load, plugins=plugins).url, expected="status of 502")
    text = page.locator("#text")
    text.fill("/sho")
    expect(page.locator("#palette [role=option]:visible")).to_have_count(1)
    expect(page.locator("#palette")).to_contain_text("Say it louder")
    text.fill("/shout Straße <b>&amp; Co")
    text.press("Enter")
    expect(page.locator("#toasts")).to_contain_text("STRASSE <B>&AMP; CO")
    expect(text).to_have_value("")
    text.fill("/explode")
    text.press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("the plugin raises failed in command explode")
    page.goto(page.url.rstrip("/") + "/settings")
    expect(page.locator("main")).to_contain_text("command explode raised ZeroDivisionError")
    page.get_by_role("button", name=words["plugin_start"]).click()
    expect(page.locator("main")).not_to_contain_text("ZeroDivisionError")


def test_operator_key_opens_the_chat_and_operator_page(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    book = KeyManager(lambda: SQLiteAccessStore(tmp_path / "data"))
    with ThreadPoolExecutor(1) as thread:  # this thread already runs the browser's event loop
        secret, _ = thread.submit(book.add, "olga", tokens_per_day=9_000, is_operator=True).result()
    page = open_page(serve(demo.load, sign_in=SignInSettings(require_key=True)).url)
    page.locator("#api_key").fill(secret)
    page.locator("#api_key").press("Enter")
    expect(page.locator("#text")).to_be_visible()
    page.goto(page.url.rstrip("/") + "/settings")
    page.get_by_role("link", name=words["operator"]).click()
    expect(page.get_by_role("heading", name="Audit log")).to_be_visible()
    expect(page.locator("main")).to_contain_text("9,000")
    expect(page.locator("main")).to_contain_text("signed in")
