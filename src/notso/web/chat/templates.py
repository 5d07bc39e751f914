"""Render page templates in worker threads, with automatic escaping, and define the filters that templates use.

Also group the sidebar's chats by day of last use, and notify pages when the marks of unread or active chats change.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.documents.values import unreadable
from notso.web.edge.access import KeyRing, caller_of, owner_of, peer_of
from notso.web.edge.assets import Assets, accepts_gzip
from notso.web.edge.errors import is_api
from notso.web.edge.request_paths import BasePathExtension, base_path
from notso.web.rendering.extensions import translate_labels
from notso.web.rendering.markdown import RENDERER_VERSION, render_plain
from notso.web.store.protocol import Chat, ChatStore, StoredMessage, ToolUse
from notso.web.tools.built_in import BUILT_IN_TOOLS
from notso.web.tools.command_view import CommandView
from notso.web.turns.chat_settings import CHOICES, NUMERIC
from notso.web.turns.citations import render_citations
from notso.web.turns.prompt import split_at_tool_calls
from notso.web.turns.sse import Feed
from notso.web.turns.turn import Turn
from notso.web.turns.turn_log import CARD_MARK, Card
from notso.web.turns.turns import Turns
from notso.web.values.errors import StorageError
from notso.web.values.fair_queue import FairQueue
from notso.web.values.ids import new_id
from notso.web.values.slash_commands import SHORTCUTS
from notso.web.values.visible_text import is_visible, visible
from notso.web.values.wording import (
    DURATION_UNITS,
    LANGUAGES,
    SYMBOLS,
    UNITS,
    direction,
    format_rate,
    isolate_direction,
    language,
    localize_number,
    number,
    select_language,
    separators,
    translated,
    words,
)

LANGUAGE_COOKIE = "notso-language"


def by_day(chats: Iterable[Chat], today: date | None = None) -> list[tuple[str, list[Chat]]]:
    """Group chats by day as (heading, chats) pairs, keeping their order; pinned chats have their own heading."""
    today = today or date.today()
    groups: dict[str, list[Chat]] = {}
    for chat in chats:
        groups.setdefault(_heading(chat, today), []).append(chat)
    return list(groups.items())


def _heading(chat: Chat, today: date) -> str:
    if chat.pinned:
        return words["day_pinned"]
    used = min(chat.updated_ms / 1000, time.time())  # the clock may have been ahead when the time was stored
    days = (today - datetime.fromtimestamp(used).date()).days
    if days <= 0:
        return words["day_today"]
    if days == 1:
        return words["day_yesterday"]
    return words["day_week" if days < 8 else "day_month" if days < 31 else "day_older"]


class ChatMarkNotifier:
    """Notifies open tabs when the marks in their chat list change. Runs on the event loop."""

    def __init__(self, turns: Turns, store: ChatStore, feed: Feed) -> None:
        self._store = store
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_mark.append(self._announce)
        turns.at_end.append(lambda turn, usage, finish_reason: self._on_turn_end(turn))

    def _announce(self, turn: Turn) -> None:
        self._feed.announce(turn.request.options.owner or "", turn.message.chat_id, "", turns=False)

    def _on_turn_end(self, turn: Turn) -> None:
        # A chat becomes unread if no page was following its answer when the answer ended.
        if turn.log.has_readers or turn.interrupted:
            return self._announce(turn)
        task = asyncio.create_task(self._mark_unread(turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mark_unread(self, turn: Turn) -> None:
        with contextlib.suppress(StorageError):
            await self._store.update_chat(turn.request.options.owner or "", turn.message.chat_id, unread=True)
        self._announce(turn)


# Smaller pages fit in one packet without compression. Secrets in compressed pages are not exposed to the BREACH attack,
# because SameSite cookies (edge/access.py) keep other sites from injecting text into the pages.
MIN_PACKED_BYTES = 1024

PACKING_LEVEL = 5
BRIEF_CHARACTERS = 80
ERROR_SWAPS = {
    "composer_errors": "target:#composer-problem swap:innerHTML",
    "models_errors": "target:#models-problem swap:innerHTML",
    "no_errors": "swap:none",
}
"""Template variable -> where htmx shows an error response, in place of the element's own target."""
TEMPLATE_DIRECTORY = Path(__file__).parents[1] / "templates"


class Pages:
    """Renders whole pages, and fragments for htmx. Template names of fragments start with an underscore."""

    def __init__(self, assets: Assets, renderer: FairQueue, view: CommandView) -> None:
        self._renderer = renderer
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATE_DIRECTORY),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[BasePathExtension],
        )
        self._environment.globals.update(
            {name: Markup(f'hx-status:4xx="{swap}" hx-status:5xx="{swap}"') for name, swap in ERROR_SWAPS.items()},
            words=words,
            root=base_path.get,
            asset=assets.url,
            icon=_icons(assets),
            fresh_id=new_id,
            slash_commands=view.commands,
            plugins=view.rows,
            shortcuts=SHORTCUTS,
            languages=LANGUAGES,
            language=language.get,
            direction=direction,
            separators=lambda: separators(language.get()),
            numeric_settings=[(each.name, "numeric" if each.kind is int else "decimal") for each in NUMERIC],
            setting_choices=CHOICES,
            always_asking={tool.name for tool in BUILT_IN_TOOLS if tool.always_asks},
        )
        filters: tuple[Callable[..., Any], ...] = (
            *(self.answer_html, reasoning_html, pretty_json, printable, visible, tool_brief, tool_duration),
            *(number, translated, unreadable, by_day, iso_time, iso_day),
        )
        self._environment.filters.update(
            {each.__name__: each for each in filters},
            size=human_size,
            duration=human_duration,
            count=human_count,
            ltr=isolate_direction,
            rate=format_rate,
        )

    async def html(self, request: Request, template: str, **context: Any) -> bytes:
        return await self._renderer.run(_renderer_client(request), lambda: self._render(request, template, context))

    async def respond(self, request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        def render() -> tuple[bytes, dict[str, str]]:
            html = self._render(request, template, context)
            if len(html) < MIN_PACKED_BYTES or not accepts_gzip(request.headers):
                return html, {"Vary": "Accept-Encoding"}
            packed = gzip.compress(html, PACKING_LEVEL, mtime=0)
            return packed, {"Vary": "Accept-Encoding", "Content-Encoding": "gzip"}

        body, headers = await self._renderer.run(_renderer_client(request), render)
        return HTMLResponse(body, status, headers)

    def _render(self, request: Request, template: str, context: dict[str, Any]) -> bytes:
        ring: KeyRing = request.app.state.key_ring
        # Users of issued keys can sign out even if the server does not require authentication.
        has_key = not ring.is_open or caller_of(request).key_id != ""
        context |= {"nonce": request.state.nonce, "has_key": has_key}
        context["may_operate"] = caller_of(request).is_operator
        context["has_accounts"] = ring.quota_check is not None and context["may_operate"]
        context["chosen_language"] = request.cookies.get(LANGUAGE_COOKIE, "")
        return self._environment.get_template(template).render(context).encode()

    def close(self) -> None:
        self._renderer.close()

    def card(self, use: ToolUse) -> Card:
        """Render a tool call. Blocking."""
        card, state, result = (
            self._environment.get_template(name).render(use=use)
            for name in ("_tool_card.html", "_tool_state.html", "_tool_result.html")
        )
        return Card(card, state, result)

    def answer_html(self, message: StoredMessage, *, is_exported: bool = False) -> Markup:
        """Return a message as safe HTML with tool calls and citations. Blocking."""
        parts = message.answer_html.split(CARD_MARK) if message.renderer == RENDERER_VERSION else []
        if len(parts) != len(message.tool_uses) + 1:
            note = Markup("" if message.active else "<p><em>{}</em></p>\n").format(words["not_yet_laid_out"])
            parts = [note + Markup(render_plain(part)) if part else "" for part in split_at_tool_calls(message)]
        html = "".join(part + self.card(use).whole for part, use in zip(parts, message.tool_uses, strict=False))
        html = render_citations(translate_labels(html + parts[-1]), message, with_links=not is_exported)
        return Markup(html)  # safe: produced by the sanitizer or escaped by a template


def _renderer_client(request: Request) -> str:
    # For pages that are rendered before the caller is authenticated, use the peer's address.
    return owner_of(request) if hasattr(request.state, "caller") else f"from {peer_of(request)}"


def is_fragment(request: Request) -> bool:
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-request-type", "") != "full"


def reasoning_html(message: StoredMessage) -> Markup:
    if message.renderer == RENDERER_VERSION:
        return Markup(translate_labels(message.reasoning_html))  # safe: produced by the sanitizer
    return Markup(render_plain(message.reasoning) if message.reasoning else "")


_INDENTED = json.JSONEncoder(indent=2, ensure_ascii=False)


def pretty_json(text: str) -> str:
    """Indent JSON; return other text unchanged."""
    # Also return JSON unchanged if indentation would make it much longer: text with many short values at a depth of 64
    # would grow 65-fold.
    pieces, remaining = list[str](), 4 * len(text) + 1000
    try:
        for piece in _INDENTED.iterencode(json.loads(text)):
            pieces.append(piece)
            remaining -= len(piece)
            if remaining < 0:
                return text
    except (ValueError, RecursionError):
        return text
    return "".join(pieces).encode("utf-8", "replace").decode()


def printable(text: str) -> str:
    return "".join(character if is_visible(character) else "�" for character in text)[:80]


def tool_brief(use: ToolUse) -> str:
    # Returns text such as '12345 * 789 → 9740205'.
    try:
        values = list(json.loads(use.arguments).values())
    except (ValueError, RecursionError, AttributeError):
        values = []
    argument = str(values[0]) if len(values) == 1 and isinstance(values[0], str | int | float) else ""
    return " → ".join(filter(None, (_shorten(argument), _shorten(use.result))))


def _shorten(text: str) -> str:
    line = visible(next((line for line in text.splitlines() if line.strip()), "").strip())
    is_cut = len(text.strip()) > len(line) or len(line) > BRIEF_CHARACTERS
    return line[:BRIEF_CHARACTERS] + (" …" if is_cut else "")


def tool_duration(milliseconds: float) -> str:
    # Returns text such as '1.2 s'.
    if milliseconds < 100:
        return words["tool_duration_short"].format(milliseconds=max(1, round(milliseconds)))
    return words["tool_duration"].format(seconds=number(milliseconds / 1000, 1))


def _icons(assets: Assets) -> Callable[[str], Markup]:
    sheet = assets.url("icons.svg")
    # In Firefox, the page's rules for #sidebar would also apply to a symbol with that id.
    glyph = Markup('<svg class="glyph" aria-hidden="true"><use href="{}#icon-{}"/></svg>')
    return lambda name: glyph.format(base_path.get() + sheet, name)


def iso_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()


def iso_day(time_ms: int) -> str:
    # Uses the server's time zone.
    return datetime.fromtimestamp(time_ms / 1000).date().isoformat()


def human_size(size: float) -> str:
    # Returns text such as '1.92 GB'.
    units = list(UNITS.get(language.get(), SYMBOLS))
    if size < 999.5:  # 999.5 would round to 1000
        return isolate_direction(f"{size:.0f} {units[0]}")
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    return isolate_direction(f"{localize_number(f'{size:.3g}')} {units[0]}")


def human_duration(seconds: float) -> str:
    # Returns text such as '1 min 15 s'.
    whole = max(1, round(seconds))
    hour, minute, second = DURATION_UNITS.get(language.get(), DURATION_UNITS["en"])
    if whole >= 3600:
        return f"{whole // 3600}{hour} {whole % 3600 // 60}{minute}"
    return f"{whole // 60}{minute} {whole % 60}{second}" if whole >= 60 else f"{whole}{second}"


def human_count(count: int) -> str:
    # Returns text such as '3.08 B'.
    for unit, scale in (("B", 1_000_000_000), ("M", 1_000_000), ("K", 1_000)):
        if count >= 0.9995 * scale:
            return isolate_direction(f"{localize_number(f'{count / scale:.3g}')} {unit}")
    return str(count)


class PageLanguage:
    """ASGI middleware that sets the language of pages. API responses are in English."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_api(scope):
            headers = Headers(scope=scope)
            chosen = cookie_parser(headers.get("cookie", "")).get(LANGUAGE_COOKIE, "")
            language.set(select_language(chosen, headers.get("accept-language", "")))
        await self._app(scope, receive, send)
