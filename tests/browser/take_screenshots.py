"""Take the documentation's screenshots in a real browser on the real engine with the demo model.

    python tests/browser/take_screenshots.py [FOLDER]      # default: docs/images

Nothing is staged: the answers are those of the demo model.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from notso.smollm3 import Engine
from notso.web.app import create_app
from notso.web.server import ChatServer, listen, page_url
from notso.web.values.settings import Settings
from notso.web.values.wording import words

FOLDER = Path(__file__).parents[2] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE = {"width": 1200, "height": 780}
PHONE = {"width": 390, "height": 844}
QUESTIONS = ("What is SmolLM3?", "What is 27 + 48?")
ANSWER_MS = 120_000


def main() -> int:
    """Take all screenshots into the folder named on the command line."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        print("no chromium found (Debian: apt install chromium)", file=sys.stderr)
        return 1
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, sync_playwright() as playwright:
        settings = Settings(port=0, data_dir=Path(data))
        listener = listen(settings)
        url = page_url(listener, settings)
        server = ChatServer(create_app(Engine.load, settings), url)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        take(browser, url, folder)
        browser.close()
        server.should_exit = True
        thread.join(20)
    return 0


def take(browser: Browser, url: str, folder: Path) -> None:
    """Take the start page, a chat with reasoning, the commands and the settings; light, dark and on a phone."""
    page = browser.new_context(
        viewport=WIDE, color_scheme="light", device_scale_factor=2, reduced_motion="reduce"
    ).new_page()
    page.goto(url)
    page.get_by_text("Demo model", exact=True).wait_for(timeout=ANSWER_MS)
    page.screenshot(path=folder / "start-light.png")
    for question in QUESTIONS:
        ask(page, question)
    unfold(page)
    page.screenshot(path=folder / "chat-light.png")
    page.locator("#text").press_sequentially("/")
    page.screenshot(path=folder / "commands-light.png")
    page.locator("#text").fill("")
    page.wait_for_timeout(600)  # the draft's tokens are counted a moment after the last key
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    page.screenshot(path=folder / "chat-dark.png")
    phone = browser.new_context(
        viewport=PHONE,
        color_scheme="light",
        device_scale_factor=2,
        is_mobile=True,
        has_touch=True,
        reduced_motion="reduce",
    ).new_page()
    phone.goto(page.url)
    unfold(phone)
    phone.screenshot(path=folder / "chat-phone.png")
    phone.emulate_media(color_scheme="dark", reduced_motion="reduce")
    phone.get_by_role("button", name=words["menu"]).click()
    phone.get_by_role("button", name="Settings", exact=True).click()
    phone.locator("#tab-model").click()
    phone.locator("#set-temperature").wait_for()
    phone.wait_for_timeout(200)
    phone.screenshot(path=folder / "settings-phone.png")


def ask(page: Page, question: str) -> None:
    """Send a question and wait for the end of its answer."""
    count = page.locator("article.assistant").count()
    page.locator("#text").fill(question)
    page.locator("#text").press("Enter")
    page.locator("article.assistant:not([aria-busy])").nth(count).wait_for(timeout=ANSWER_MS)


def unfold(page: Page) -> None:
    """Open the newest reasoning and scroll to the end."""
    summary = page.locator("article.assistant").last.locator(".reasoning summary")
    if summary.is_visible():
        summary.click()
        page.wait_for_timeout(300)  # until the box is open
    page.evaluate("document.getElementById('scroller').scrollTop = 1e6")
    page.wait_for_timeout(200)


if __name__ == "__main__":
    raise SystemExit(main())
