"""Routes of shared links, which make a chat public until the link expires or is revoked."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from notso.web.chat.chat_view import read_shown, require
from notso.web.chat.views import Fields, FoundChat, Page, PageRequest
from notso.web.edge.access import GUARDED, PUBLIC, Caller, KeyRing, audited
from notso.web.edge.request_paths import base_path
from notso.web.rendering.mathml import convert_formulas
from notso.web.sign_in.users import KEY_OWNER
from notso.web.store.protocol import MOST_SHOWN, Chat, ShareLink
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem
from notso.web.values.wording import words

router = APIRouter()

DAYS = (1, 7, 30)
DAY_MS = 86_400_000
SECRET_BYTES = 24
First = Annotated[int | None, Query(ge=1, lt=1 << 31)]
HEADERS = {"X-Robots-Tag": "noindex", "Cache-Control": "no-store"}


@router.get("/chats/{chat_id}/share", dependencies=[GUARDED])
async def show_links(page: Page, chat: FoundChat) -> Response:
    return await page.respond_with_sidebar("share.html", chat=chat, link="", **await _context(page, chat))


@router.post("/chats/{chat_id}/share", dependencies=[audited("shared a chat")])
async def add_link(page: Page, chat: FoundChat, fields: Fields) -> Response:
    """Create a link to the chat up to its last message. The secret in the link is shown once and not stored."""
    days = fields.get("days", "")
    view = await read_shown(page, chat.id)
    if days not in map(str, DAYS) or chat.temporary or not view.path:
        raise Problem(400, words["error_form"])
    secret, now = secrets.token_urlsafe(SECRET_BYTES), current_ms()
    last = view.path[-1].message.id
    share = ShareLink(_digest(secret), page.owner, chat.id, last, now, now + int(days) * DAY_MS)
    require(await page.store.add_share(page.owner, share), words["error_unknown_chat"])
    server_url = str(page.request.base_url).rstrip("/") + base_path.get()
    link = f"{server_url}/shared/{secret}"
    return await page.respond_with_sidebar("share.html", chat=chat, link=link, **await _context(page, chat))


@router.post("/chats/{chat_id}/share/{share_id}/delete", dependencies=[audited("revoked a shared link")])
async def delete_link(page: Page, chat: FoundChat, _: Fields, share_id: str) -> Response:
    require(await page.store.delete_share(page.owner, chat.id, share_id))
    return page.redirect(f"/chats/{chat.id}/share")


@router.get("/shared/{secret}", dependencies=[PUBLIC])
async def show_shared(page: Page, secret: str, first: First = None) -> Response:
    """Show a shared chat without reasoning. Messages added after the link was created are not shown.

    If a response was edited or continued later, the new text is shown. A long chat is shown in parts; the selected
    part ends before message `first` (counted from 0).
    """
    services, store = page.services, page.store
    found = await store.shared(_digest(secret), current_ms()) if len(secret) < 100 else None
    share = require(found, words["share_gone"])
    if share.owner.startswith(KEY_OWNER):
        owner = Caller(share.owner, "", key_id=share.owner.removeprefix(KEY_OWNER))
        ring: KeyRing = page.request.app.state.key_ring
        # Links of a revoked key do not work, because its owner can no longer delete them.
        require(await ring.with_current_key(owner), words["share_gone"])
    last = await store.shown_message(share.owner, share.chat_id, share.message_id)
    # A part is selected by a number, because a message id could belong to another branch.
    before = await store.shown_before(share.owner, share.chat_id, share.message_id, MOST_SHOWN, first=first)
    if before is None or last is None:
        raise Problem(404, words["share_gone"])
    shown = [each.message for each in (before.path if first else (*before.path, last))]
    context = {"chat": before.chat, "shared": True, "earlier": before.earlier}
    async with services.exporting.turn(share.owner):
        line = await services.html_cache.messages(share.owner, shown)
        html = await services.pages.html(page.request, "shared.html", line=line, **context)
        shown_html, _ = await convert_formulas(html.decode(), services.html_cache.mathml)
    return Response(shown_html, media_type="text/html; charset=utf-8", headers=HEADERS)


async def _context(page: PageRequest, chat: Chat) -> dict[str, Any]:
    shares = await page.store.shares(page.owner, chat.id, current_ms())
    rows = [
        {"id": each.id, "made": _format_time(each.created_ms), "expires": _format_time(each.expires_ms)}
        for each in shares
    ]
    return {"shares": rows, "days": DAYS}


def _format_time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
