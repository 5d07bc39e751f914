"""HTML and SVG that a model wrote, drawn in a frame that can do nothing: no scripts, no forms, no network, no origin.

Scripts and whatever could speak to the network by itself are taken out, and the frame's own policy refuses the rest.
"""

from __future__ import annotations

from html import escape

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import HTMLResponse

from notso.web.chat.services import Services
from notso.web.chat.views import Owner
from notso.web.confined_child import ConfinedWorkError
from notso.web.edge.access import guarded
from notso.web.edge.forms import read_form
from notso.web.rendering.html_preview import preview_html
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter(dependencies=[Depends(guarded)])

POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_CALM = (  # what can be drawn so slowly that the page around it stands still
    "<style>@layer calm { * { filter: none !important; backdrop-filter: none !important; "
    "mix-blend-mode: normal !important } }</style>"
)


@router.post("/preview")
async def show_preview(request: Request, services: Services, owner: Owner) -> Response:
    """What the text draws, or why it cannot be shown. One at a time for each owner: it takes a process."""
    text = (await read_form(request)).get("text", "")
    try:
        async with services.previews.turn(owner):
            return _page(await preview_html(text))
    except ConfinedWorkError:
        return _page(escape(words["error_preview"]), 413)
    except Problem as problem:
        return _page(escape(problem.sentence), problem.status)


def _page(html: str, status: int = 200) -> Response:
    page = f'<!doctype html><meta charset="utf-8"><title>preview</title>{_CALM}{html}'
    return HTMLResponse(page, status, {"Content-Security-Policy": POLICY, "X-DNS-Prefetch-Control": "off"})
