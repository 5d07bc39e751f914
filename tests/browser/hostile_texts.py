"""A thousand hostile texts that a model might generate or a user might paste."""

from __future__ import annotations

import random

RUN = "window.pwned=1"
FAR = "https://evil.example/x"

# Elements that try to run a script ({0}) or to fetch an address ({1}).
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
    *(
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "![x](data:image/svg+xml,<svg onload={0}>)",
        "<a href=data:text/html,x>y</a>",
    ),
    *(
        "<svg><a xlink:href='javascript:{0}'><text>x</text></a></svg>",
        "<svg><use href={1}#x /></svg>",
        "<svg><style>*{{}}",
    ),
    *(
        "<svg><animate onbegin={0} attributeName=x>",
        "<svg><foreignObject><iframe src={1}>",
        "<math href='javascript:{0}'>x",
    ),
    *("<math><annotation-xml encoding=text/html><script>{0}</script>", "<math><maction actiontype=statusline#{1}>x"),
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
# Markup around the element.
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
BROKEN = [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\x80<", b"\xfe\xff"]
"""Invalid UTF-8."""

BATCHES = 4
IN_ALL = 1000


def hostile(batch: int) -> list[bytes]:
    """Return a quarter of the texts: every element and every frame many times; each seventh is invalid UTF-8."""
    chance = random.Random(batch)
    found = []
    for number in range(IN_ALL // BATCHES):
        element = ELEMENTS[(number + IN_ALL // BATCHES * batch) % len(ELEMENTS)]
        frame = FRAMES[(number // 3 + batch * 7) % len(FRAMES)]
        text = element.format(RUN, FAR)
        spelled = "".join(c.upper() if chance.random() < 0.3 else c for c in text) if number % 5 == 0 else text
        data = frame.replace("{}", spelled).encode()
        if number % 7 == 0:
            at = chance.randrange(len(data) + 1)
            data = data[:at] + chance.choice(BROKEN) + data[at:]
        found.append(data)
    return found
