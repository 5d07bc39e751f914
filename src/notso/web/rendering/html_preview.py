"""Sanitize HTML and SVG from a model for a preview: remove scripts and most links to resources that load automatically.

The sanitizer's running time is quadratic in the number of open elements, so it runs in a child process with limited
CPU time.
"""

from __future__ import annotations

import nh3

from notso.system.confinement import Limits, serve_confined

# Typical pages of 256 KiB take about 0.02 s.
LIMITS = Limits(cpu_s=1, memory_bytes=512 * 2**20, wall_s=10.0, answer_bytes=8 * 2**20)

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
    *("class", "id", "style", "width", "height", "align", "valign", "color", "bgcolor", "border", "cellpadding"),
    *("type", "value", "placeholder", "checked", "disabled", "for", "name", "open", "min", "max", "rows", "cols"),
    *("colspan", "rowspan", "src", "alt", "title", "lang", "dir", "role", "viewBox", "xmlns", "d", "fill", "stroke"),
    *("points", "stroke-width", "stroke-linecap", "stroke-linejoin", "stroke-dasharray", "opacity", "fill-opacity"),
    *("fill-rule", "transform", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "rx", "ry", "dx", "dy", "offset"),
    *("stop-color", "stop-opacity", "gradientUnits", "gradientTransform", "font-size", "font-family", "font-weight"),
    *("text-anchor", "dominant-baseline", "clip-path", "preserveAspectRatio", "href", "stroke-opacity"),
    *("letter-spacing",),
}


def _filter_attribute(tag: str, attribute: str, value: str) -> str | None:
    # Links may refer only to parts of the same drawing, such as #gradient.
    return value if attribute != "href" or value.startswith("#") else None


_CLEANER = nh3.Cleaner(
    tags=_HTML | _SVG,
    clean_content_tags={"script"},
    attributes={"*": _ATTRIBUTES},
    url_schemes={"data"},
    url_relative="pass_through",
    attribute_filter=_filter_attribute,
    generic_attribute_prefixes={"aria-"},
    link_rel=None,
)


async def preview_html(text: str) -> str:
    """Sanitize HTML in a child process. Raises ConfinedWorkError, for example if LIMITS are exceeded."""
    from notso.web.values.child_work import run_confined  # not at the top: loads asyncio, which the child does not need

    return (await run_confined(_PROGRAM, text.encode(), LIMITS)).decode()


def main() -> None:
    """Run the child process: sanitize the HTML on stdin."""
    serve_confined(lambda text: _CLEANER.clean(text.decode()).encode(), LIMITS)
