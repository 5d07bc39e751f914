"""The page in Firefox and WebKit, driven by their own protocols. Browsers that are not installed are skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from browser.demo_engine import DemoEngine

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
WEBKIT = shutil.which("WebKitWebDriver")
XVFB = shutil.which("Xvfb")
WAIT_S = 60
ENTER = "\ue007"
LINES = (
    "document.getElementById('text').dispatchEvent(new CustomEvent('write', { detail: { value: 'a\\nb\\nc\\nd' } }))"
)

WATCH = """new MutationObserver(() => sessionStorage.setItem("marks", document.getElementById("status").className))
    .observe(document.getElementById("status"), { attributeFilter: ["class"] });"""
STAY = """Object.assign(document.createElement("a"), { href: "/export", download: "" }).click();
dispatchEvent(new Event("beforeunload", { cancelable: true }));"""
HEIGHTS = "const { offsetHeight, scrollHeight } = document.getElementById('text'); return [offsetHeight, scrollHeight];"


class RemoteError(Exception):
    """A browser refused a command."""


class Firefox:
    """Speaks Marionette, the protocol behind Firefox's WebDriver: messages with their length, over a socket."""

    def __init__(self, folder: Path) -> None:
        assert FIREFOX is not None
        (folder / "prefs.js").write_text('user_pref("marionette.port", 0);\n')
        command = [FIREFOX, "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        listening = next(line for line in self.process.stdout if "Listening on port" in line)
        # Firefox would block if nobody read what it writes.
        Thread(target=deque, args=(self.process.stdout, 0), daemon=True).start()
        self._socket = socket.create_connection(("127.0.0.1", int(listening.split()[-1])))
        self._input = self._socket.makefile("rb")
        self._read()
        self._call("NewSession", capabilities={})
        self._call("SetTimeouts", script=WAIT_S * 1000)

    def _read(self) -> Any:
        size = b""
        while (byte := self._input.read(1)) != b":":
            size += byte
        return json.loads(self._input.read(int(size)))

    def _call(self, name: str, **fields: Any) -> Any:
        message = json.dumps([0, 1, f"WebDriver:{name}", fields]).encode()
        self._socket.sendall(b"%d:%b" % (len(message), message))
        *_, error, value = self._read()
        if error is not None:
            raise RemoteError(error["message"])
        return value

    def open(self, url: str) -> None:
        self._call("Navigate", url=url)

    def run(self, script: str) -> Any:
        return self._call("ExecuteScript", script=script, args=[])["value"]

    def wait(self, script: str) -> Any:
        return self._call("ExecuteAsyncScript", script=script, args=[])["value"]

    def find(self, selector: str) -> str:
        return str(next(iter(self._call("FindElement", using="css selector", value=selector)["value"].values())))

    def click(self, selector: str) -> None:
        self._call("ElementClick", id=self.find(selector))

    def type(self, selector: str, text: str) -> None:
        self._call("ElementSendKeys", id=self.find(selector), text=text)

    def press(self, x: int, y: int) -> None:
        self._call("PerformActions", actions=_press(x, y))

    def resize(self, width: int, height: int) -> None:
        self._call("SetWindowRect", width=width, height=height)

    def close(self) -> None:
        self._call("DeleteSession")
        self._socket.close()
        self.process.terminate()
        self.process.wait()


class WebKit:
    """Speaks WebDriver to WebKitGTK's driver, with a display of its own."""

    def __init__(self, folder: Path) -> None:
        assert WEBKIT is not None and XVFB is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        read, write = os.pipe()
        display = [XVFB, "-displayfd", str(write), "-screen", "0", "1400x1000x24", "-nolisten", "tcp"]
        self._display = subprocess.Popen(display, pass_fds=[write], stderr=subprocess.DEVNULL)
        os.close(write)
        with os.fdopen(read) as number:
            shown = f":{number.readline().strip()}"
        found = os.environ | {"DISPLAY": shown, "GDK_BACKEND": "x11", "HOME": str(folder)}
        self.process = subprocess.Popen(
            [WEBKIT, f"--port={port}"], env=found, stderr=subprocess.DEVNULL, start_new_session=True
        )
        starting = httpx.HTTPTransport(retries=8)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/session", timeout=2 * WAIT_S, transport=starting)
        created = self._client.post("", json={"capabilities": {}}).json()["value"]
        self._client.base_url = self._client.base_url.join(f"/session/{created['sessionId']}")
        self._call("timeouts", script=WAIT_S * 1000)
        self.resize(1200, 860)

    def _call(self, path: str, **fields: Any) -> Any:
        answer = self._client.post(f"/{path}", json=fields)
        value = answer.json()["value"]
        if answer.is_error:
            raise RemoteError(value["message"])
        return value

    def open(self, url: str) -> None:
        self._call("url", url=url)

    def run(self, script: str) -> Any:
        return self._call("execute/sync", script=script, args=[])

    def wait(self, script: str) -> Any:
        return self._call("execute/async", script=script, args=[])

    def find(self, selector: str) -> str:
        return str(next(iter(self._call("element", using="css selector", value=selector).values())))

    def click(self, selector: str) -> None:
        self._call(f"element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._call(f"element/{self.find(selector)}/value", text=text)

    def press(self, x: int, y: int) -> None:
        self._call("actions", actions=_press(x, y))

    def resize(self, width: int, height: int) -> None:
        self._call("window/rect", width=width, height=height)

    def close(self) -> None:
        self._client.close()
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()
        self._display.terminate()
        self._display.wait()


def _press(x: int, y: int) -> list[dict[str, Any]]:
    steps = [
        {"type": "pointerMove", "x": x, "y": y, "duration": 0},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerUp", "button": 0},
    ]
    return [{"type": "pointer", "id": "mouse", "actions": steps}]


@pytest.fixture(scope="module", params=["firefox", "webkit"])
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox | WebKit]:
    if request.param == "firefox" and not FIREFOX:
        pytest.skip("no Firefox found (Debian: apt install firefox-esr)")
    if request.param == "webkit" and not (WEBKIT and XVFB):
        pytest.skip("no WebKit found (Debian: apt install webkit2gtk-driver xvfb)")
    kind = Firefox if request.param == "firefox" else WebKit
    remote = kind(tmp_path_factory.mktemp(request.param))
    yield remote
    remote.close()


def _until(remote: Firefox | WebKit, condition: str) -> None:
    """Wait in the browser, which tests the condition before each frame, and again in the next page if it is left."""
    script = f"const done = arguments[0], look = () => {condition} ? done() : requestAnimationFrame(look); look();"
    for _ in range(3):
        try:
            return remote.wait(script)
        except RemoteError as error:
            if "unload" not in str(error):
                raise
    raise AssertionError(condition)


def test_question_is_answered_and_copied(serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit) -> None:
    demo.dictate("The sum is $x^2$.\n\n```python\nprint(75)\n```", "I add.")
    remote.open(serve(demo.load).url)
    remote.run(LINES)
    high, whole = remote.run(HEIGHTS)
    assert high == whole, "the input shows all four lines"
    remote.type("#text", ENTER)
    _until(remote, "document.querySelector('article.assistant')?.dataset.state === 'done'")
    assert remote.run(HEIGHTS)[0] < high
    _until(remote, "document.querySelector('.answer .katex')")
    remote.click(".copy-code")
    _until(remote, "'done' in document.querySelector('.copy-code').dataset")


def test_press_outside_closes_a_dialog(serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit) -> None:
    remote.open(serve(demo.load).url)
    remote.click("#sidebar [commandfor=settings]")
    assert remote.run("return document.getElementById('settings').open")
    below = "return document.getElementById('theme-name').getBoundingClientRect().bottom"
    beside = "return document.querySelector('.segments label').getBoundingClientRect().top"
    assert remote.run(below) > remote.run(beside), "the name and the choices of the theme share a line"
    left, top = remote.run(
        "const { x, y } = document.getElementById('settings').getBoundingClientRect(); return [x, y]"
    )
    remote.press(round(left) + 12, round(top) + 12)
    assert remote.run("return document.getElementById('settings').open")
    remote.press(round(left) - 12, round(top) + 12)
    _until(remote, "!document.getElementById('settings').open")


def test_leaving_a_page_reports_no_broken_stream(
    serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit
) -> None:
    remote.open(serve(demo.load).url)
    _until(remote, "document.getElementById('feed')._htmx?.sse?.reader")
    remote.run(WATCH)
    remote.click("#sidebar a[href='/documents']")
    _until(remote, "location.pathname === '/documents' && document.readyState === 'complete'")
    assert remote.run("return sessionStorage.getItem('marks')") is None


def test_answer_continues_after_links_that_keep_the_page(
    serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit
) -> None:
    demo.dictate("One two three four five six seven.", "I count.")
    remote.open(serve(demo.load).url)
    with demo.held("answer"):
        remote.type("#text", f"Count{ENTER}")
        _until(remote, "document.querySelector('.answer')?.textContent.includes('One')")
        remote.run(WATCH + STAY)
    _until(remote, "document.querySelector('article.assistant').dataset.state === 'done'")
    assert remote.run("return document.querySelector('.answer').textContent.trim()") == (
        "One two three four five six seven."
    )
    assert remote.run("return sessionStorage.getItem('marks')") is None


def test_sidebar_with_menus_can_be_hidden(
    serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit
) -> None:
    """WebKit 2.50 hangs if an element with fallback positions is inside a hidden one."""
    remote.open(serve(demo.load).url)
    remote.type("#text", f"Hello{ENTER}")
    _until(remote, "document.querySelector('article.assistant')?.dataset.state === 'done'")
    for width in (700, 1200):
        remote.resize(width, 860)
        is_shown = str(width == 1200).lower()
        _until(remote, f"document.querySelector('#sidebar').checkVisibility() === {is_shown}")
        remote.run("document.body.append(document.querySelector('.rail-shown .glyph').cloneNode(true))")
        _until(remote, "document.body.lastElementChild.getBBox().width > 0")  # the rules for #sidebar are for no icon
    remote.run("document.querySelector('#sidebar .row-menu').click()")
    _until(remote, "document.querySelector('#sidebar .menu:popover-open')")
    remote.run("document.documentElement.dataset.rail = 'off'")
    _until(remote, "!document.querySelector('#sidebar').checkVisibility()")


def test_placeholder_of_a_right_to_left_page_is_inside_its_field(
    serve: Callable[..., Any], demo: DemoEngine, remote: Firefox | WebKit
) -> None:
    remote.open(serve(demo.load).url)
    remote.run("document.dir = 'rtl'; document.getElementById('text').placeholder = 'مرحبا';")
    width, whole = remote.run("const { clientWidth, scrollWidth } = text; return [clientWidth, scrollWidth];")
    assert whole == width
