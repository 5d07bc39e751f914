"""Preview of HTML and SVG written by a model, in a frame without scripts, forms, network or origin.

The sanitizer removes scripts and anything that loads by itself; the frame's policy refuses the rest.
"""

from __future__ import annotations

from html import escape

from fastapi import APIRouter, Request, Response
from starlette.responses import HTMLResponse

from notso.system.confinement import ConfinedWorkError
from notso.web.chat.services import Services
from notso.web.chat.views import Owner
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.rendering.html_preview import preview_html
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter()

POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_CALM = (  # effects so slow to draw that they freeze the page around the frame
    "<style>@layer calm { * { filter: none !important; backdrop-filter: none !important; "
    "mix-blend-mode: normal !important } }</style>"
)


@router.post("/preview", dependencies=[GUARDED])
async def show_preview(request: Request, services: Services, owner: Owner) -> Response:
    """Render the text, or why it was refused."""
    text = (await read_form(request)).get("text", "")
    try:
        # Each preview starts a process: one at a time per owner.
        async with services.previews.turn(owner):
            return _page(await preview_html(text))
    except ConfinedWorkError:
        return _page(escape(words["error_preview"]), 413)
    except Problem as problem:
        return _page(escape(problem.sentence), problem.status)


def _page(html: str, status: int = 200) -> Response:
    page = f'<!doctype html><meta charset="utf-8"><title>preview</title>{_CALM}{html}'
    return HTMLResponse(page, status, {"Content-Security-Policy": POLICY, "X-DNS-Prefetch-Control": "off"})
