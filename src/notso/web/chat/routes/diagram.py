"""The frame that draws diagrams: it may run scripts and do nothing else.

Its document has an origin of its own, which the page's files are not served to, so the scripts are within it. Their
digests are the only ones that its policy allows.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from functools import cache

from fastapi import APIRouter, Request, Response

from notso.web.edge.access import PUBLIC
from notso.web.edge.assets import STATIC_DIRECTORY, Asset, accepts_gzip

router = APIRouter()

SCRIPTS = ("vendor/mermaid/mermaid.min.js", "diagram.js")
_PAGE = (
    '<!doctype html><meta charset="utf-8"><title>diagram</title><style>body { margin: 1rem; font-family: system-ui; }'
    " .dark { color: #ececef; background: #17181b; } svg { max-width: 100%; height: auto; }</style>"
    '<body><div id="diagram"></div>'
)


@router.get("/diagram", dependencies=[PUBLIC])
async def show_frame(request: Request) -> Response:
    """Return the frame's document, which is the same for everyone and holds no user's data."""
    page, policy = await asyncio.to_thread(_frame)
    headers = {"Content-Security-Policy": policy, "Cache-Control": "public, max-age=3600", "Vary": "Accept-Encoding"}
    if accepts_gzip(request.headers):
        packed = await asyncio.to_thread(lambda: page.packed)
        return Response(packed, media_type=page.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(page.body, media_type=page.media_type, headers=headers)


@cache
def _frame() -> tuple[Asset, str]:
    # `<!--` would hide the end of the script; both spellings are the same text to JavaScript.
    scripts = [(STATIC_DIRECTORY / name).read_text("utf-8").replace("<!--", "<\\x21--") for name in SCRIPTS]
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    body = _PAGE + "".join(f"<script>{each}</script>" for each in scripts)
    policy = (
        f"sandbox allow-scripts; default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "font-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
    )
    return Asset(body.encode(), "text/html; charset=utf-8"), policy
