"""Templates to HTML, in worker threads of their own, with autoescape always on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from notso.plugins.plugin_set import Plugins
from notso.web.chat.chat_list import by_day
from notso.web.edge.access import KeyRing, caller_of, owner_of, peer_of
from notso.web.edge.assets import Assets
from notso.web.languages.page_language import LANGUAGE_COOKIE
from notso.web.rendering.labels import with_labels
from notso.web.rendering.markdown import RENDERER_VERSION, render_plain
from notso.web.store.protocol import StoredMessage, ToolUse
from notso.web.tools.plugin_view import PluginView
from notso.web.turns.tool_rounds import parts_of
from notso.web.turns.turn_log import CARD_MARK, Card
from notso.web.values.fair_queue import FairQueue
from notso.web.values.ids import new_id
from notso.web.values.shortcuts import SHORTCUTS
from notso.web.values.visible_text import is_visible, visible
from notso.web.values.wording import LANGUAGES, language, localised, number, words

MIN_PACKED_BYTES = 1024
"""Less fits into one packet as it is. That lengths tell of what is packed together harms nobody here: a stranger's page
cannot ask in the owner's name (SameSite, edge/access.py), so no stranger chooses a part of what is measured."""

PACKING_LEVEL = 5
BRIEF_CHARACTERS = 80
T = TypeVar("T")
TEMPLATE_DIRECTORY = Path(__file__).parents[1] / "templates"


class Pages:
    """Renders templates; partials begin with an underscore and also serve as answers to htmx."""

    def __init__(self, assets: Assets, renderer: FairQueue, plugins: Plugins | None = None) -> None:
        view = PluginView(plugins or Plugins())
        self._renderer = renderer
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATE_DIRECTORY),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals.update(
            words=words,
            asset=assets.url,
            icon=_icons(assets),
            fresh_id=new_id,
            slash_commands=view.commands,
            plugins=view.rows,
            shortcuts=SHORTCUTS,
            languages=LANGUAGES,
            language=language.get,
        )
        self._environment.filters.update(
            answer_html=self.answer_html,
            pretty_json=pretty_json,
            printable=printable,
            visible=visible,
            tool_brief=tool_brief,
            tool_duration=tool_duration,
            reasoning_html=reasoning_html,
            size=human_size,
            duration=human_duration,
            count=human_count,
            number=number,
            by_day=by_day,
        )

    async def html(self, request: Request, template: str, **context: Any) -> bytes:
        """The rendered template; it knows this request's nonce."""
        return await self._renderer.run(_whose(request), lambda: self._render(request, template, context))

    async def respond(self, request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        """The rendered template as an answer, compressed where the browser can."""

        def render() -> tuple[bytes, dict[str, str]]:
            html = self._render(request, template, context)
            if len(html) < MIN_PACKED_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
                return html, {"Vary": "Accept-Encoding"}
            packed = gzip.compress(html, PACKING_LEVEL, mtime=0)
            return packed, {"Vary": "Accept-Encoding", "Content-Encoding": "gzip"}

        body, headers = await self._renderer.run(_whose(request), render)
        return HTMLResponse(body, status, headers)

    def _render(self, request: Request, template: str, context: dict[str, Any]) -> bytes:
        ring: KeyRing = request.app.state.key_ring
        context |= {"nonce": request.state.nonce, "has_key": not ring.open}
        context["may_operate"] = caller_of(request).is_operator
        context["has_accounts"] = ring.gate is not None and context["may_operate"]
        context["chosen_language"] = request.cookies.get(LANGUAGE_COOKIE, "")
        return self._environment.get_template(template).render(context).encode()

    def close(self) -> None:
        """Nothing more is rendered."""
        self._renderer.close()

    def card(self, use: ToolUse) -> Card:
        """A tool call as HTML. What model and tool wrote is escaped in it. Takes time: not on the loop."""
        whole, state, result = (
            self._environment.get_template(name).render(use=use)
            for name in ("_tool_card.html", "_tool_state.html", "_tool_result.html")
        )
        return Card(whole, state, result)

    def answer_html(self, message: StoredMessage) -> Markup:
        """A message's safe HTML with the cards of its tool calls: its text, plain, where it has no HTML yet.

        Takes time: not on the loop.
        """
        parts = message.answer_html.split(CARD_MARK) if message.renderer == RENDERER_VERSION else []
        if len(parts) != len(message.tool_uses) + 1:
            note = Markup("" if message.active else "<p><em>{}</em></p>\n").format(words["not_yet_laid_out"])
            parts = [note + Markup(render_plain(part)) if part else "" for part in parts_of(message)]
        html = "".join(part + self.card(use).whole for part, use in zip(parts, message.tool_uses, strict=False))
        return Markup(with_labels(html + parts[-1]))  # it left our sanitiser, or was escaped by our template


def _whose(request: Request) -> str:
    """Whose turn a page takes: of who is not known, that of the other end."""
    return owner_of(request) if hasattr(request.state, "caller") else f"from {peer_of(request)}"


def is_fragment(request: Request) -> bool:
    """Whether htmx asks, for a piece of a page rather than a whole one. The only reader of its headers."""
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-request-type", "") != "full"


def reasoning_html(message: StoredMessage) -> Markup:
    """The thoughts' safe HTML: their text, plain, where they have no HTML yet."""
    if message.renderer == RENDERER_VERSION:
        return Markup(with_labels(message.reasoning_html))  # it left our sanitiser
    return Markup(render_plain(message.reasoning) if message.reasoning else "")


def pretty_json(text: str) -> str:
    """JSON over several lines, its letters as letters; what is none, as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return text


def printable(text: str) -> str:
    """A name on one line, whatever it is made of."""
    return "".join(character if is_visible(character) else "�" for character in text)[:80]


def tool_brief(use: ToolUse) -> str:
    """What went in and what came out, on one line: '12345 * 789 → 9740205'."""
    try:
        values = list(json.loads(use.arguments).values())
    except (ValueError, RecursionError, AttributeError):
        values = []
    asked = str(values[0]) if len(values) == 1 and isinstance(values[0], str | int | float) else ""
    return " → ".join(filter(None, (_brief(asked), _brief(use.result))))


def _brief(text: str) -> str:
    line = visible(next((line for line in text.splitlines() if line.strip()), "").strip())
    rest = len(text.strip()) > len(line) or len(line) > BRIEF_CHARACTERS
    return line[:BRIEF_CHARACTERS] + (" …" if rest else "")


def tool_duration(milliseconds: float) -> str:
    """4.2 -> '4 ms', 1234.5 -> '1.2 s'."""
    if milliseconds < 100:
        return words["tool_duration_short"].format(milliseconds=max(1, round(milliseconds)))
    return words["tool_duration"].format(seconds=number(milliseconds / 1000, 1))


def _icons(assets: Assets) -> Callable[[str], Markup]:
    """A template's `icon("send")`: a drawing from the one sheet of them, for the eye only."""
    sheet = assets.url("icons.svg")
    return lambda name: Markup('<svg class="glyph" aria-hidden="true"><use href="{}#{}"/></svg>').format(sheet, name)


def human_size(count_bytes: int) -> str:
    """1915305312 -> '1.92 GB'."""
    size = float(count_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:  # what rounds to 1000 is one of the next unit
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{localised(f'{size:.3g}')} {unit}"
        size /= 1000
    return f"{localised(f'{size:.3g}')} GB"


def human_duration(seconds: float) -> str:
    """75 -> '1 min 15 s', 7500 -> '2 h 5 min'."""
    whole = max(1, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def human_count(count: int) -> str:
    """3075098624 -> '3.08 B'."""
    for unit, scale in (("B", 1_000_000_000), ("M", 1_000_000), ("K", 1_000)):
        if count >= 0.9995 * scale:
            return f"{localised(f'{count / scale:.3g}')} {unit}"
    return str(count)
