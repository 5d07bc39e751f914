"""Printing: the text and ink of the PDF match the chat in both themes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
from playwright.sync_api import Browser, Page
from scripted_engine import ScriptedEngine

CODE = "print('" + "x" * 150 + "END-OF-LINE')"
QUESTION = "How fast is it? " + "A longer question. " * 12
ANSWER = f"""# Heading one

It takes $O(n \\log n)$ steps.

$$\\frac{{\\alpha}}{{\\beta}} + \\sum_{{i=1}}^{{n}} i$$

1. first
2. second

مرحبا بالعالم، هذا نص عربي.

```python
{CODE}
{chr(10).join(f"line_{at} = {at}" for at in range(70))}
```

| one | two |
|-----|-----|
| a1  | b2  |

""" + "".join(
    f"Paragraph {at} of a long answer, with words enough to fill a line or two of it. " * 3 + "\n\n" for at in range(40)
)
LAST = "The last formula is $\\sqrt{\\gamma}$ and the end."
SCALE = 0.5
WHITE, BLACK = 250, 110  # brightness, from 0 to 255


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Callable[..., Page]) -> Callable[..., Page]:
    def open_chat(theme: str) -> Page:
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER, "reasoning_content": "A hidden thought."},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": LAST},
        ]
        server = serve(ScriptedEngine())
        page = open_page(server.url, color_scheme=theme)
        page.evaluate(
            """async (body) => {
                const headers = { "Content-Type": "application/json", Accept: "application/json" };
                const answer = await fetch("/import", { method: "POST", headers, body });
                location.assign("/chats/" + (await answer.json()).chats[0]);
            }""",
            json.dumps({"messages": messages}),
        )
        page.wait_for_url(re.compile("/chats/"))
        page.locator("#turns > article").nth(3).wait_for(state="attached")
        page.wait_for_function(
            """() => {
                const fonts = [...document.fonts].filter((face) => face.family.includes("KaTeX_Math"));
                return fonts.length && fonts.every((face) => face.status === "loaded");
            }"""
        )
        if theme == "dark":
            page.evaluate("document.documentElement.dataset.theme = 'dark'")
        return page

    return open_chat


def text_of(pages: list[Any]) -> str:
    return "\n".join(page.get_textpage().get_text_range() for page in pages)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_printed_chat_has_complete_text_in_black_on_white(
    chat: Callable[..., Page], theme: str, tmp_path: Path
) -> None:
    page = chat(theme)
    # Print while scrolled to the top, so the formulas at the end have never been near the viewport.
    page.locator("#scroller").evaluate("element => { element.scrollTop = 0; }")
    target = tmp_path / "chat.pdf"
    page.pdf(path=target, format="A4")
    document = pypdfium2.PdfDocument(target)
    pages = [document[at] for at in range(len(document))]
    text = text_of(pages)
    joined = re.sub(r"\s", "", text)
    for part in (
        "You",
        "Assistant",
        "Heading one",
        "A longer question.",
        "first",
        "second",
        "a1",
        "b2",
        "line_69 = 69",
    ):
        assert re.sub(r"\s", "", part) in joined, part
    assert re.sub(r"\s", "", CODE) in joined, "a long line of code is complete"
    for at in range(40):
        assert f"Paragraph{at}of" in joined
    assert re.search("[\u0600-\u06ff\ufb50-\ufeff]{3}", text), "Arabic letters"
    for left in ("\\frac", "\\sqrt", "\\log", "$", "Skip to", "Copy", "Wrap", "tokens"):
        assert left not in text, left
    assert "γ" in text or "𝛾" in text, "the last formula is typeset"
    # Ink: black on white, and no text overlaid at the top of a page.
    darkest = 255
    for each in pages:
        image = each.render(scale=SCALE).to_numpy()[:, :, :3]
        corners = [int(image[y, x].min()) for y in (2, -3) for x in (2, -3)]
        assert min(corners) > WHITE, "white paper"
        darkest = min(darkest, int(image.min()))
        assert (image.min(axis=2) > WHITE).mean() > 0.7
    assert darkest < BLACK, "black ink"
    assert pages[1].get_textpage().get_text_range().count("Skip") == 0


def test_an_exported_page_has_typeset_formulas(chat: Callable[..., Page], browser: Browser, tmp_path: Path) -> None:
    page = chat("light")
    html = page.evaluate("async () => (await fetch(location.pathname + '/export/html')).text()")
    assert html.count("<math ") == 3 and "exported as TeX" not in html
    file = tmp_path / "chat.html"
    file.write_text(html, "utf-8")
    exported = browser.new_page()
    exported.goto(file.as_uri())
    boxes = exported.evaluate(
        """() => [...document.querySelectorAll("article")].map((each) => {
            const { top, bottom } = each.getBoundingClientRect();
            return [top, bottom];
        })"""
    )
    assert len(boxes) > 1
    assert all(above[1] <= below[0] for above, below in pairwise(boxes)), "messages do not overlap"
    assert exported.locator("math").first.evaluate("element => element.getBoundingClientRect().width") > 10
    exported.close()
