"""HTML and SVG that a model wrote, drawn in a frame that can do nothing: no scripts, no forms, no network, no origin.

Scripts and whatever could speak to the network by itself are taken out, and the frame's own policy refuses the rest.
"""

from __future__ import annotations

import asyncio

import nh3
from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import HTMLResponse

from notso.web.edge.access import guarded
from notso.web.edge.forms import read_form

router = APIRouter(dependencies=[Depends(guarded)])

POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_SVG = {
    *("svg", "g", "path", "circle", "ellipse", "line", "polyline", "polygon", "rect", "text", "tspan", "defs", "use"),
    *("linearGradient", "radialGradient", "stop", "clipPath", "mask", "pattern", "marker", "symbol", "title", "desc"),
}
_HTML = nh3.ALLOWED_TAGS | {
    *("html", "head", "body", "style", "main", "section", "button", "input", "label", "select", "option", "textarea"),
    *("form", "fieldset", "legend", "progress", "meter", "dialog", "picture", "font", "u", "output", "datalist"),
}
_ATTRIBUTES = {
    *(
        "class",
        "id",
        "style",
        "width",
        "height",
        "align",
        "valign",
        "color",
        "bgcolor",
        "border",
        "cellpadding",
        "type",
    ),
    *("value", "placeholder", "checked", "disabled", "for", "name", "open", "min", "max", "rows", "cols", "colspan"),
    *("rowspan", "src", "alt", "title", "lang", "dir", "role", "viewBox", "xmlns", "d", "fill", "stroke", "points"),
    *("stroke-width", "stroke-linecap", "stroke-linejoin", "stroke-dasharray", "opacity", "fill-opacity", "fill-rule"),
    *("transform", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "rx", "ry", "dx", "dy", "offset", "stop-color"),
    *("stop-opacity", "gradientUnits", "gradientTransform", "font-size", "font-family", "font-weight", "text-anchor"),
    *("dominant-baseline", "clip-path", "preserveAspectRatio", "href", "stroke-opacity", "letter-spacing"),
}
_CALM = (  # what can be drawn so slowly that the page around it stands still
    "<style>@layer calm { * { filter: none !important; backdrop-filter: none !important; "
    "mix-blend-mode: normal !important } }</style>"
)


def _kept(tag: str, attribute: str, value: str) -> str | None:
    """Links lead to parts of the same drawing (#gradient) and nowhere else."""
    return value if attribute != "href" or value.startswith("#") else None


_CLEANER = nh3.Cleaner(
    tags=_HTML | _SVG,
    clean_content_tags={"script"},
    attributes={"*": _ATTRIBUTES},
    url_schemes={"data"},
    url_relative="pass_through",
    attribute_filter=_kept,
    generic_attribute_prefixes={"aria-"},
    link_rel=None,
)


@router.post("/preview")
async def show_preview(request: Request) -> Response:
    """What the text draws."""
    text = (await read_form(request)).get("text", "")
    html = await asyncio.to_thread(_CLEANER.clean, text)
    page = f'<!doctype html><meta charset="utf-8"><title>preview</title>{_CALM}{html}'
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-DNS-Prefetch-Control": "off"})
