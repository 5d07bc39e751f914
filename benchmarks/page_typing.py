"""Measure the latency from a key press to its display in a long chat, in Chromium.

    python benchmarks/page_typing.py src/notso/demo/demo.gguf

On a busy machine, run it with `chrt -f 20` to exclude other load; the result records this. The chat has 300 messages
with code, tables and formulas, all of which are shown. The latency of a key is the time from its event to the first
task after the next animation frame. Keys are pressed every 80 ms, as by a fast typist, while the page estimates the
tokens of the draft, as usual. The server runs on the same cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from server import Server, keep
from stream_readers import quantile

from notso.smollm3.diagnostics.benchmark import StolenTime

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
KEY_MS = 80
ANSWER = (
    "Some **words** and `code`, then a formula $x^2$.\n\n```python\ndef f(n: int) -> int:\n    return n * 2\n```\n"
    "\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n1. one\n2. two\n\n> A quotation of one line.\n"
)
IMPORT = """async (messages) => {
    const headers = { "Content-Type": "application/json", "HX-Request": "true" };
    const answer = await fetch("/import", { method: "POST", headers, body: JSON.stringify({ messages }) });
    return answer.headers.get("HX-Redirect");
}"""
WATCH = """() => {
    window.seen = [];
    document.getElementById("text").addEventListener("keydown", (event) => {
        const channel = new MessageChannel();
        channel.port1.onmessage = () => window.seen.push(performance.now() - event.timeStamp);
        requestAnimationFrame(() => channel.port2.postMessage(null));
    }, true);
}"""


def measure(page: Page, url: str, messages: int, keys: int) -> tuple[int, list[float]]:
    """Return the number of messages shown and the latency of each key in milliseconds."""
    page.goto(url)
    turns = [{"role": "user", "content": f"Question {n}"} for n in range(messages // 2)]
    told = [each for turn in turns for each in (turn, {"role": "assistant", "content": ANSWER})]
    page.goto(f"{url}{page.evaluate(IMPORT, told)}?all=on")
    shown = page.locator("#turns > article").count()
    page.evaluate(WATCH)
    page.locator("#text").focus()
    for number in range(keys):
        page.keyboard.press("Space" if (key := TEXT[number % len(TEXT)]) == " " else key)
        page.wait_for_timeout(KEY_MS)
    return shown, page.evaluate("window.seen")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("--messages", type=int, default=300)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        sys.exit("no chromium found (Debian: apt install chromium)")
    stolen, load_before = StolenTime(), os.getloadavg()[0]
    server = Server(given.file, ["--cache-disk", "0", "--no-browser"])
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            shown, times = measure(page, f"http://127.0.0.1:{server.port}", given.messages, given.keys)
            chromium = browser.version
            browser.close()
    finally:
        server.close()
    times.sort()
    figures: dict[str, Any] = {
        "chromium": chromium,
        "messages": shown,
        "keys": len(times),
        "load_before": round(load_before, 2),
        "real_time": hasattr(os, "SCHED_FIFO") and os.sched_getscheduler(0) == os.SCHED_FIFO,
        "key_ms": {name: round(quantile(times, part), 1) for name, part in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))},
    }
    keep(figures, stolen, given.out)


if __name__ == "__main__":
    main()
