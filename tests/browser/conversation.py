"""Common steps of the page's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

AXE = Path(__file__).parent / "axe" / "axe.min.js"


def ask(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def answers(page: Page) -> Locator:
    """Return the shown answers."""
    return page.locator("#turns article.assistant")


def questions(page: Page) -> Locator:
    """Return the shown questions."""
    return page.locator("#turns article.user")


def last_answer(page: Page) -> Locator:
    """Return the newest answer."""
    return answers(page).last


def finished(page: Page, count: int = 1, *, state: str = "done") -> None:
    """Wait until this many answers are shown and the newest has ended."""
    expect(answers(page)).to_have_count(count)
    expect(last_answer(page)).to_have_attribute("data-state", state)


def begin(page: Page, text: str = "Hello") -> None:
    """Send the first question and wait for the end of its answer."""
    ask(page, text)
    page.wait_for_url("**/chats/*")
    finished(page)


def show_settings(page: Page, tab: str = "general") -> None:
    """Open a tab of the settings."""
    if not page.locator("#settings").is_visible():
        # on a phone the button is in the drawer
        page.locator("#sidebar [commandfor=settings]").evaluate("button => button.click()")
    page.locator(f"#tab-{tab}").click()


def chat_row(page: Page, title: str) -> Locator:
    """Open the menu of a chat in the list."""
    row = page.locator("#chat-list .chats > li").filter(has=page.get_by_role("link", name=title))
    row.hover()
    row.locator(".row-menu").click()
    return row.locator("[popover]")


def more(answer: Locator) -> Locator:
    """Open the menu of an answer."""
    answer.hover()
    answer.locator("[popovertarget$=-more]").click()
    return answer.locator("[popover]")


def until(page: Page, condition: str, argument: Any = None) -> None:
    """Poll the condition. Playwright's own wait evaluates strings, which the page's policy forbids."""
    for _ in range(2400):
        if page.evaluate(condition, argument):
            return
        page.wait_for_timeout(25)
    raise AssertionError(condition)


def imported(page: Page, messages: list[dict[str, str]]) -> None:
    """Import a chat with these messages and open it."""
    place = page.evaluate(
        """async (messages) => {
            const headers = { "Content-Type": "application/json", "HX-Request": "true" };
            const answer = await fetch("/import", { method: "POST", headers, body: JSON.stringify({ messages }) });
            return answer.headers.get("HX-Redirect") ?? `${answer.status} ${await answer.text()}`;
        }""",
        messages,
    )
    assert place.startswith("/chats/"), place
    page.goto("/".join(page.url.split("/")[:3]) + place)
