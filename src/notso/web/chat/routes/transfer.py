"""Routes for export, backup and import of chats."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from markupsafe import Markup
from starlette.responses import FileResponse, RedirectResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from notso.web.chat.files.export import (
    CHAT_TAIL,
    JSON_HEAD,
    JSON_TAIL,
    MARKDOWN_TAIL,
    file_name,
    json_head,
    json_messages,
    markdown_head,
    markdown_messages,
)
from notso.web.chat.files.imports import ImportedChat, read_chats
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.submit import title_of
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import Owner, find_chat, tab_of
from notso.web.edge.access import GUARDED, audited, operator_only
from notso.web.edge.assets import STATIC_DIRECTORY
from notso.web.edge.client_connection import connection_of
from notso.web.edge.forms import FORM_TYPE, parse_form
from notso.web.store.protocol import BACKUP_ELSEWHERE, Chat, StoredMessage
from notso.web.values.errors import StorageDamagedError
from notso.web.values.ids import new_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter()

Kind = Literal["md", "json", "html"]
GIVE_WAY_SECONDS = 2.0  # a download stalled for longer gives way to the next
STYLES = ("tokens.css", "surfaces.css", "text.css", "messages.css")


@router.get("/chats/{chat_id}/export/{kind}", dependencies=[GUARDED])
async def export_chat(request: Request, services: Services, owner: Owner, chat_id: str, kind: Kind) -> Response:
    """Export the shown branch as Markdown or HTML, or everything as JSON."""
    chat = await find_chat(services, owner, chat_id)
    name = file_name(chat, kind)
    if kind == "json":
        return await _download(_as_json(services, owner, [chat]), "application/json", name)
    if kind == "md":
        return await _download(_as_markdown(services, owner, chat), "text/markdown; charset=utf-8", name)
    return await _download(_as_html(request, services, owner, chat), "text/html; charset=utf-8", name)


@router.get("/export", dependencies=[audited("exported all chats")])
async def export_all(services: Services, owner: Owner) -> Response:
    """Export all readable chats; the file name says if some are missing."""
    chats, name = await services.shared.store.chats(owner), "notso-chats.json"
    chats = [chat for chat in chats if not chat.temporary]
    if services.shared.store.read_only:
        readable = [chat for chat in chats if await _can_be_read(services, owner, chat)]
        chats, name = readable, name if len(readable) == len(chats) else "notso-chats-not-all.json"
    return await _download(_as_json(services, owner, chats), "application/json", name)


@router.get("/backup", dependencies=[operator_only(audit="took a backup")])
async def backup(services: Services) -> Response:
    """Download a copy of the SQLite database. Raises Problem 429 while busy, 501 on PostgreSQL."""
    if services.shared.store.is_shared:
        raise Problem(501, BACKUP_ELSEWHERE)
    # One at a time: each copy is as large as the database. A stalled download is dropped for the next.
    if services.backup_waits or services.backing_up.locked():
        unread_since = services.backup_reader.unread_since if services.backup_reader is not None else None
        has_stalled = unread_since is not None and time.monotonic() - unread_since >= GIVE_WAY_SECONDS
        if services.backup_waits or services.backup_reader is None or not has_stalled:
            raise Problem(429, words["error_backing_up"], retry_after_seconds=10)
        services.backup_reader.drop()
    services.backup_waits = True  # others would wait for the whole download of this one
    try:
        await services.backing_up.acquire()
    finally:
        services.backup_waits = False
    copy = services.shared.settings.directory / f"backup-{new_id()}.db"
    try:
        await services.shared.store.backup(copy)
    except BaseException:
        copy.unlink(missing_ok=True)
        services.backing_up.release()
        raise
    name = f"notso-backup-{date.today().isoformat()}.db"
    return _PassingFile(services, copy, media_type="application/vnd.sqlite3", filename=name)


@router.post("/import", dependencies=[audited("imported chats")])
async def import_chats(request: Request, services: Services, owner: Owner) -> Response:
    """Add chats from an export or a message list."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", FORM_TYPE):
        raise Problem(415, words["import_unknown"])
    body = await request.body()

    def read() -> list[ImportedChat]:
        return read_chats(parse_form(body).get("json", "").encode() if kind == FORM_TYPE else body, title_of)

    # Held until the chats are stored: a parsed file takes several times its size in memory.
    async with services.importing.turn(owner):
        chats = await services.importing.work(read)
        await services.shared.store.add_chats(owner, chats)
        for chat, _ in chats:
            services.feed.announce(owner, chat.id, tab_of(request), turns=False)
    address = f"/chats/{chats[0][0].id}"
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


class _ReaderGoneError(Exception):
    pass


class _PassingFile(FileResponse):
    def __init__(self, services: ChatServices, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._services.backup_reader = connection_of(scope)

        async def send_while_read(message: Message) -> None:
            if reader is not None and reader.gone:
                raise _ReaderGoneError
            await send(message)

        try:
            with contextlib.suppress(_ReaderGoneError):
                await super().__call__(scope, receive, send_while_read)
        finally:
            # The one backup is gone once it was sent or its reader left; then another may start.
            self._services.backup_reader = None
            self._services.backing_up.release()
            await asyncio.to_thread(Path(self.path).unlink, missing_ok=True)


async def _pieces(
    services: ChatServices,
    owner: str,
    chat: Chat,
    written: Callable[[list[StoredMessage]], Awaitable[bytes]],
    *,
    shown: bool,
) -> AsyncIterator[bytes]:
    """Yield a chat's messages in pieces, each read only after the client took the one before it."""
    pieces = services.shared.store.message_pieces(owner, chat.id, shown=shown)
    while True:
        async with services.exporting.turn(owner):
            messages = await anext(pieces, None)
            if messages is None:
                return
            piece = await written(messages)
            del messages
        yield piece


def _off_loop(
    services: ChatServices, written: Callable[[list[StoredMessage]], bytes]
) -> Callable[[list[StoredMessage]], Awaitable[bytes]]:
    return lambda messages: services.exporting.work(partial(written, messages))


async def _as_json(services: ChatServices, owner: str, chats: Iterable[Chat]) -> AsyncIterator[bytes]:
    before = JSON_HEAD
    for number, chat in enumerate(chats):
        before += (b"\n" if number == 0 else b",\n") + json_head(chat)
        async for piece in _pieces(services, owner, chat, _off_loop(services, json_messages), shown=False):
            yield before + piece
            before = b","
        before = (before if before != b"," else b"") + CHAT_TAIL
    yield before + JSON_TAIL


async def _as_markdown(services: ChatServices, owner: str, chat: Chat) -> AsyncIterator[bytes]:
    before = markdown_head(chat)
    async for piece in _pieces(services, owner, chat, _off_loop(services, markdown_messages), shown=True):
        yield before + piece
        before = b""
    yield before + MARKDOWN_TAIL


async def _as_html(request: Request, services: ChatServices, owner: str, chat: Chat) -> AsyncIterator[bytes]:
    async def written(messages: list[StoredMessage]) -> bytes:
        answers = [each for each in messages if each.role == "assistant"]
        html = {each.id: each for each in await services.kept_html.messages(owner, answers)}
        line = [html.get(each.id, each) for each in messages]
        return await services.pages.html(request, "_export_messages.html", line=line)

    css = await asyncio.to_thread(_css)
    page = await services.pages.html(request, "export.html", chat=chat, css=css)
    before, _, after = page.partition(b"<!-- messages -->\n")
    async for piece in _pieces(services, owner, chat, written, shown=True):
        yield before + piece
        before = b""
    yield before + after


async def _can_be_read(services: ChatServices, owner: str, chat: Chat) -> bool:
    try:
        await services.shared.store.messages(owner, chat.id)
    except StorageDamagedError:
        return False
    return True


def _css() -> Markup:
    texts = [path.read_text() for name in STYLES if (path := Path(STATIC_DIRECTORY, name)).exists()]
    return Markup("\n".join(texts))  # trusted: the package's own files


async def _download(pieces: AsyncIterator[bytes], media_type: str, name: str) -> Response:
    first = await anext(pieces)  # what fails at once has a status of its own

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body(), media_type=media_type, headers=headers)
