"""HTML and SVG that a model wrote, without scripts and whatever could speak to the network by itself.

The sanitizer takes time in the square of how many elements are open at once, so it runs as a program of its own, whose
CPU time is limited; this file is that program, too.
"""

from __future__ import annotations

import nh3

from notso.web.confined_child import Limits, confined, serve_one

LIMITS = Limits(cpu_s=1, memory_bytes=512 * 2**20, wall_s=10.0, answer_bytes=8 * 2**20)
"""Pages of 256 KiB as people write them take about 0.02 s."""

_PROGRAM = "from notso.web.rendering.html_preview import main; main()"
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


async def preview_html(text: str) -> str:
    """Return what may be shown of a text. Raises ConfinedWorkError where it costs too much."""
    return (await confined(_PROGRAM, text.encode(), LIMITS)).decode()


def main() -> None:
    """The child: a text on stdin, what may be shown of it on stdout."""
    serve_one(lambda text: _CLEANER.clean(text.decode()).encode(), LIMITS)
