"""The token view of an answer: a click shows the alternatives of a token, and choosing one continues from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.conversation import answers, begin, finished, more
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect


def test_new_version_starts_at_a_selected_token(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine, picture: Callable[..., None]
) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "Tell me something")
    answer = answers(page).last
    more(answer).get_by_role("link", name="Tokens").click()
    page.keyboard.press("Escape")
    tokens = answer.locator(".token-list a")
    expect(tokens.nth(3)).to_be_visible()
    tokens.nth(1).click()
    expect(answer.locator(".tokens form").first).to_contain_text("%")
    picture(page, "tokens")
    answer.locator('.tokens button[name="token"]:not([aria-current])').first.click()
    expect(page.locator(".versions").last).to_contain_text("2/2")
    finished(page)
    menu = more(answers(page).last)
    with page.expect_download() as download:
        menu.get_by_role("link", name="Receipt", exact=True).click()
    told = json.loads(Path(download.value.path()).read_text())
    assert demo.engine is not None and demo.engine.check_receipt(told).place == 1, "the user chose this token"
