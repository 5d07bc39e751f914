"""Sandboxed frames for model output: one for previews of HTML and SVG, and one for diagrams.

In previews, scripts, forms and network access are disabled: the sanitizer removes scripts and most resources that load
automatically, and the content security policy blocks whatever remains. The frame for diagrams has an opaque origin and
cannot load the page's files, so its scripts are inlined, and its policy allows only their digests.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from functools import cache
from html import escape

from fastapi import APIRouter, Response
from starlette.responses import HTMLResponse

from notso.system.confinement import ConfinedWorkError
from notso.web.chat.views import Fields, Page
from notso.web.edge.access import GUARDED, PUBLIC
from notso.web.edge.assets import STATIC_DIRECTORY, Asset, accepts_gzip
from notso.web.rendering.html_preview import preview_html
from notso.web.values.errors import Problem
from notso.web.values.wording import words

router = APIRouter()

POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_CALM = (  # disables effects that are slow enough to freeze the page around the frame
    "<style>@layer calm { * { filter: none !important; backdrop-filter: none !important; "
    "mix-blend-mode: normal !important } }</style>"
)


@router.post("/preview", dependencies=[GUARDED])
async def show_preview(page: Page, fields: Fields) -> Response:
    """Render the code in the request, or an error message."""
    try:
        # The sanitizer runs in a child process; each user may run one at a time.
        async with page.services.previews.turn(page.owner):
            return _page(await preview_html(fields.get("text", "")))
    except ConfinedWorkError:
        return _page(escape(words["error_preview"]), 413)
    except Problem as problem:
        return _page(escape(problem.sentence), problem.status)


def _page(html: str, status: int = 200) -> Response:
    page = f'<!doctype html><meta charset="utf-8"><title>preview</title>{_CALM}{html}'
    return HTMLResponse(page, status, {"Content-Security-Policy": POLICY, "X-DNS-Prefetch-Control": "off"})


SCRIPTS = ("vendor/mermaid/mermaid.min.js", "diagram.js")
_PAGE = (
    '<!doctype html><meta charset="utf-8"><title>diagram</title><style>body { margin: 1rem; font-family: system-ui; }'
    " .dark { color: #ececef; background: #17181b; } svg { max-width: 100%; height: auto; }</style>"
    '<body><div id="diagram"></div>'
)


@router.get("/diagram", dependencies=[PUBLIC])
async def show_frame(page: Page) -> Response:
    """Return the frame for diagrams, which is the same for all users and contains no data."""
    frame, policy = await asyncio.to_thread(_frame)
    headers = {"Content-Security-Policy": policy, "Cache-Control": "public, max-age=3600", "Vary": "Accept-Encoding"}
    if accepts_gzip(page.request.headers):
        packed = await asyncio.to_thread(lambda: frame.packed)
        return Response(packed, media_type=frame.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(frame.body, media_type=frame.media_type, headers=headers)


@cache
def _frame() -> tuple[Asset, str]:
    # In a script element, `<!--` could hide the closing tag, so replace `!` with `\x21`, its JavaScript string escape.
    scripts = [(STATIC_DIRECTORY / name).read_text("utf-8").replace("<!--", "<\\x21--") for name in SCRIPTS]
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    body = _PAGE + "".join(f"<script>{each}</script>" for each in scripts)
    policy = (
        f"sandbox allow-scripts; default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "font-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
    )
    return Asset(body.encode(), "text/html; charset=utf-8"), policy
