"""Fixtures for a real browser and a real server. Without Chromium, these tests are skipped."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from browser.demo_engine import DemoEngine
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, expect, sync_playwright
from scripted_engine import ScriptedEngine
from web.shared_between_servers import share_between_servers

from notso.plugins.process import Plugins
from notso.web.app import create_app
from notso.web.engine.models import ModelRegistry
from notso.web.engine.port import ChatEngine
from notso.web.server import ChatServer, listen, page_url
from notso.web.values.settings import Settings

share_between_servers()

PICTURES = Path(__file__).parents[2] / "artifacts" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 40_000  # generous, because the machine may be busy
STARTED = time.time()
FAILED = pytest.StashKey[bool]()
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--no-first-run", "--mute-audio"),
    "--host-resolver-rules=MAP notso.test 127.0.0.1",  # a name that is not loopback for the browser
]


BY_DEFAULT = ("chat", "documents", "messages", "safety", "tools")
"""Files whose first test runs by default."""
WHOLE = "safety"
"""The file that runs completely by default, because it tests protection from hostile texts."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run few tests by default and the rest only if the page or its server has changed, because a test in a browser
    takes two CPU seconds."""
    here, seen = str(Path(__file__).parent) + os.sep, set[Path]()
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)
            name = item.path.stem.removeprefix("test_")
            if name not in BY_DEFAULT or (item.path in seen and name != WHOLE):
                item.add_marker(pytest.mark.long("page"))
            seen.add(item.path)


expect.set_options(timeout=WAIT_MS)


opened = ExitStack()


@cache
def launched() -> Browser:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("no chromium found (Debian: apt install chromium)")
    for picture in PICTURES.glob("*.png"):  # removes files of an earlier run, but not of a parallel worker
        with suppress(FileNotFoundError):
            if picture.stat().st_mtime < STARTED:
                picture.unlink()
    playwright = opened.enter_context(sync_playwright())
    browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
    opened.callback(browser.close)
    return browser


@pytest.fixture(scope="module")
def browser() -> Browser:
    return launched()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the browser after the last test here, because playwright keeps an event loop running in this thread, which
    makes asyncio.run fail."""
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        opened.close()
        launched.cache_clear()


class Served:
    """A server in a thread."""

    def __init__(
        self,
        source: Callable[[], ChatEngine],
        settings: Settings,
        model_registry: ModelRegistry | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        self.app = create_app(source, settings, model_registry=model_registry, plugins=plugins)
        listener = listen(settings)
        self.url = page_url(listener, settings)
        self.port = listener.getsockname()[1]
        self.server = ChatServer(self.app, self.url)
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def begin_close(self) -> None:
        self.server.should_exit = True

    def close(self) -> None:
        self.begin_close()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def closing() -> Iterator[list[Served]]:
    """Servers that have been asked to shut down. Each takes a moment, so their exit is awaited after the last test.
    Servers that have exited are removed, or the garbage collector would visit all their objects again and again."""
    servers: list[Served] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def serve(tmp_path: Path, closing: list[Served]) -> Iterator[Callable[..., Served]]:
    """Return a function that starts servers and closes them at the end of the test; keyword arguments are settings."""
    started: list[Served] = []

    def begin(
        engine: ScriptedEngine | Callable[[], ChatEngine],
        *,
        model_registry: ModelRegistry | None = None,
        plugins: Plugins | None = None,
        **settings: Any,
    ) -> Served:
        source = engine if callable(engine) else lambda: engine
        chosen = Settings(**({"port": 0, "data_dir": tmp_path / "data"} | settings))
        started.append(Served(source, chosen, model_registry, plugins))
        return started[-1]

    yield begin
    for server in started:
        server.begin_close()
    closing[:] = [each for each in (*closing, *started) if each.is_running]


@pytest.fixture
def demo() -> Iterator[DemoEngine]:
    """The real engine with the demo model: `serve(demo.load)`."""
    engine = DemoEngine()
    yield engine
    engine.release()
    engine.engine = None  # release the engine's memory; the server object lives until its exit is awaited


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


class Pictures:
    """Saves screenshots to artifacts/screenshots for review."""

    def __init__(self, test: pytest.Item) -> None:
        module = Path(test.path).stem.removeprefix("test_")
        self._stem = re.sub(r"[^\w.-]+", "-", f"{module}-{test.name.removeprefix('test_')}").strip("-")
        self.taken = 0

    def __call__(self, page: Page, what: str = "", *, dark: bool = False) -> None:
        """Take a screenshot, with `dark` a second one in the dark theme."""
        # Playwright's default hides the caret through style attributes, which the page's policy blocks.
        PICTURES.mkdir(parents=True, exist_ok=True)
        name = f"{self._stem}-{what}" if what else self._stem
        page.screenshot(path=PICTURES / f"{name}.png", caret="initial")
        if dark:
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=PICTURES / f"{name}-dark.png", caret="initial")
            page.emulate_media(color_scheme="light")
        self.taken += 1


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Pictures:
    """Return `picture(page, "what", dark=True)`. A test that never calls it gets a screenshot of its last page."""
    return Pictures(request.node)


@pytest.fixture
def open_page(browser: Browser, picture: Pictures, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a tab. `like=page` shares that page's context; keyword arguments configure a new
    one.

    At the end, fail on console errors that do not match `expected` and on requests to other origins.
    """
    pages: list[Page] = []
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    allowed: set[str] = set()

    def begin(url: str, *, like: Page | None = None, expected: str = "", **options: Any) -> Page:
        context = (
            like.context if like else browser.new_context(**({"viewport": {"width": 1100, "height": 760}} | options))
        )
        if like is None:
            contexts.append(context)
        # Chromium aborts a page transition if the second page is left too early.
        excused = re.compile(f"{expected or '(?!)'}|Transition was aborted because of invalid state")
        page = context.new_page()
        pages.append(page)
        allowed.add("/".join(url.split("/")[:3]) + "/")

        def complain(text: str) -> None:
            if not excused.search(text):
                complaints.append(text)

        def look(message: ConsoleMessage) -> None:
            if message.type == "error":
                complain(f"{message.text} ({message.location['url']}:{message.location['lineNumber']})")

        def check(request: Request) -> None:
            if not request.url.startswith(tuple(allowed)) and not request.url.startswith(("data:", "blob:")):
                complain(f"a request to {request.url}")

        page.on("console", look)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("request", check)
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        return page

    yield begin
    failed = request.node.stash.get(FAILED, False)
    left = [page for page in pages if not page.is_closed()]
    for number, page in enumerate(left if failed else left[-1:] if not picture.taken else [], start=1):
        with suppress(Error):  # a failed screenshot must not fail the test
            picture(page, f"failed-{number}" if failed else "")
    for context in contexts:
        context.close()
    assert complaints == []
