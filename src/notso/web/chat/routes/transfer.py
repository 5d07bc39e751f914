"""Routes for export, backup and import of chats."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Response
from markupsafe import Markup
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
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
from notso.web.chat.files.import_process import parse_in_child
from notso.web.chat.files.imports import ImportedChat, ParsedImport, new_messages, validate_chats
from notso.web.chat.services import ChatServices, ChatUser
from notso.web.chat.submit import derive_title
from notso.web.chat.views import Page, PageRequest, find_chat, render_page
from notso.web.edge.access import GUARDED, audited, operator_only
from notso.web.edge.assets import STATIC_DIRECTORY
from notso.web.edge.connections import connection_of
from notso.web.edge.forms import FORM_TYPE, parse_form
from notso.web.rendering.mathml import convert_formulas
from notso.web.store.protocol import BACKUP_ELSEWHERE, Chat, StoredMessage
from notso.web.values.errors import Problem, StorageDamagedError
from notso.web.values.ids import new_id
from notso.web.values.wording import number, words

router = APIRouter()

Kind = Literal["md", "json", "html"]
STALL_SECONDS = 2.0  # a backup download that has stalled for this long is aborted when another is requested
LEFT_OUT = ("pictures", "files", "tool_calls", "references", "texts", "chats", "damaged")
"""Kinds of omitted content that an import counts, in the order in which they are reported."""
IMPORT_TYPES = (
    *("application/json", "application/x-ndjson", "application/jsonl", "application/gzip", "application/zip"),
    *("application/x-zip-compressed", "application/octet-stream"),
)
STYLES = ("tokens.css", "surfaces.css", "text.css", "messages.css", "print.css")


@router.get("/chats/{chat_id}/export/{kind}", dependencies=[GUARDED])
async def export_chat(page: Page, chat_id: str, kind: Kind) -> Response:
    """Export the shown branch as Markdown or HTML, or all branches as JSON."""
    chat = await find_chat(page, chat_id)
    name = file_name(chat, kind)
    if kind == "json":
        return await _stream_download(_as_json(page, [chat]), "application/json", name)
    if kind == "md":
        return await _stream_download(_as_markdown(page, chat), "text/markdown; charset=utf-8", name)
    return await _stream_download(_as_html(page, chat), "text/html; charset=utf-8", name)


@router.get("/export", dependencies=[audited("exported all chats")])
async def export_all(page: Page) -> Response:
    """Export all readable chats except temporary ones. The file name indicates whether some are unreadable."""
    chats, name = await page.store.chats(page.owner), "notso-chats.json"
    chats = [chat for chat in chats if not chat.temporary]
    if page.store.read_only:
        readable = [chat for chat in chats if await _can_be_read(page, chat)]
        chats, name = readable, name if len(readable) == len(chats) else "notso-chats-not-all.json"
    return await _stream_download(_as_json(page, chats), "application/json", name)


@router.get("/backup", dependencies=[operator_only(audit="took a backup")])
async def backup(page: Page) -> Response:
    """Download a copy of the SQLite database. Raises Problem (429 during another backup, 501 with PostgreSQL)."""
    services = page.services
    if page.store.is_shared:
        raise Problem(501, BACKUP_ELSEWHERE)
    # One backup at a time, because each copy is as large as the database. A new download aborts a stalled one.
    if services.backup_waits or services.backing_up.locked():
        unread_since = services.backup_reader.unread_since if services.backup_reader is not None else None
        has_stalled = unread_since is not None and time.monotonic() - unread_since >= STALL_SECONDS
        if services.backup_waits or services.backup_reader is None or not has_stalled:
            raise Problem(429, words["error_backing_up"], retry_after_seconds=10)
        services.backup_reader.drop()
    services.backup_waits = True  # reject further requests while this one waits
    try:
        await services.backing_up.acquire()
    finally:
        services.backup_waits = False
    copy = services.shared.settings.directory / f"backup-{new_id()}.db"
    try:
        await page.store.backup(copy)
    except BaseException:
        copy.unlink(missing_ok=True)
        services.backing_up.release()
        raise
    name = f"notso-backup-{date.today().isoformat()}.db"
    return _BackupResponse(services, copy, media_type="application/vnd.sqlite3", filename=name)


@router.post("/import", dependencies=[audited("imported chats")])
async def import_chats(page: Page) -> Response:
    """Import chats from an export of this or another program, or from a message list.

    For chats that were imported before, only new messages are added.
    """
    kind = page.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (*IMPORT_TYPES, FORM_TYPE):
        raise Problem(415, words["import_unknown"])
    body, importing = await page.request.body(), page.services.importing
    # Keep the import slot until the chats are stored, because a parsed file takes several times its size in memory.
    async with importing.turn(page.owner):
        if kind == FORM_TYPE:
            form = body
            body = await importing.work(lambda: parse_form(form).get("json", "").encode())
        entries = await parse_in_child(body)
        parsed = await importing.work(partial(validate_chats, entries, derive_title))
        report = await _store(page, parsed)
    for chat_id in report.changed:
        page.announce(chat_id)
    return await _import_response(page, report)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import: ids of chats in the order of the file, and counts."""

    chats: list[str]
    added: list[str]
    extended: list[str]
    messages: int
    left_out: dict[str, int]

    @property
    def changed(self) -> list[str]:
        return [*self.added, *self.extended]

    @property
    def sentence(self) -> str:
        counts = {
            "chats": len(self.added),
            "messages": self.messages,
            "extended": len(self.extended),
            "known": len(self.chats) - len(self.changed),
        }
        parts = [
            words["imported_" + name].format(count=number(count))
            for name, count in counts.items()
            if count or name == "chats"
        ]
        omissions = [f"{words['left_out_' + name]} {number(count)}" for name, count in self.left_out.items()]
        return " ".join(parts) + (
            " " + words["left_out"].format(what=words["comma"].join(omissions)) if omissions else ""
        )


async def _store(user: ChatUser, parsed: ParsedImport) -> ImportReport:
    store = user.store
    earlier_imports = await store.earlier_imports(user.owner, [chat.source for chat, _ in parsed.chats if chat.source])

    def find_new_messages() -> list[list[StoredMessage]]:
        return [
            new_messages(chat_messages, earlier) if (earlier := earlier_imports.get(chat.source)) is not None else []
            for chat, chat_messages in parsed.chats
        ]

    additions = await user.services.importing.work(find_new_messages)
    new: dict[str, ImportedChat] = {}
    chats, added, extended, messages = [], [], [], 0
    for (chat, chat_messages), added_messages in zip(parsed.chats, additions, strict=True):
        earlier = earlier_imports.get(chat.source)
        if earlier is not None:
            if added_messages and earlier.chat_id not in extended:  # a file may contain the same chat twice
                await store.add_messages(user.owner, added_messages)
                extended.append(earlier.chat_id)
                messages += len(added_messages)
            chats.append(earlier.chat_id)
            continue
        key = chat.source or chat.id
        if key not in new:
            new[key] = chat, chat_messages
            added.append(chat.id)
            messages += len(chat_messages)
        chats.append(new[key][0].id)
    if new:
        await store.add_chats(user.owner, list(new.values()))
    left_out = {name: parsed.left_out[name] for name in LEFT_OUT if parsed.left_out[name]}
    return ImportReport(list(dict.fromkeys(chats)), added, extended, messages, left_out)


async def _import_response(page: PageRequest, report: ImportReport) -> Response:
    if "application/json" in page.request.headers.get("accept", ""):
        return JSONResponse({**asdict(report), "report": report.sentence})
    if not report.left_out and (len(report.chats) == 1 or not page.is_fragment):
        return page.redirect(f"/chats/{report.chats[0]}")
    return await render_page(page, "imported.html", report=report.sentence)


class _ClientDisconnectedError(Exception):
    pass


class _BackupResponse(FileResponse):
    def __init__(self, services: ChatServices, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = self._services.backup_reader = connection_of(scope)

        async def send_while_read(message: Message) -> None:
            if reader is not None and reader.gone:
                raise _ClientDisconnectedError
            await send(message)

        try:
            with contextlib.suppress(_ClientDisconnectedError):
                await super().__call__(scope, receive, send_while_read)
        finally:
            self._services.backup_reader = None
            try:
                await asyncio.to_thread(Path(self.path).unlink, missing_ok=True)
            finally:
                self._services.backing_up.release()


async def _render_chunks(
    page: PageRequest, chat: Chat, render: Callable[[list[StoredMessage]], Awaitable[bytes]], *, shown: bool
) -> AsyncIterator[bytes]:
    chunks = page.store.message_chunks(page.owner, chat.id, shown=shown)
    while True:
        async with page.services.exporting.turn(page.owner):
            messages = await anext(chunks, None)
            if messages is None:
                return
            rendered = await render(messages)
            del messages
        yield rendered


def _in_export_queue(
    page: PageRequest, render: Callable[[list[StoredMessage]], bytes]
) -> Callable[[list[StoredMessage]], Awaitable[bytes]]:
    return lambda messages: page.services.exporting.work(partial(render, messages))


async def _as_json(page: PageRequest, chats: Iterable[Chat]) -> AsyncIterator[bytes]:
    before = JSON_HEAD
    for at, chat in enumerate(chats):
        before += (b"\n" if at == 0 else b",\n") + json_head(chat)
        async for rendered in _render_chunks(page, chat, _in_export_queue(page, json_messages), shown=False):
            yield before + rendered
            before = b","
        before = (before if before != b"," else b"") + CHAT_TAIL
    yield before + JSON_TAIL


async def _as_markdown(page: PageRequest, chat: Chat) -> AsyncIterator[bytes]:
    before = markdown_head(chat)
    async for piece in _render_chunks(page, chat, _in_export_queue(page, markdown_messages), shown=True):
        yield before + piece
        before = b""
    yield before + MARKDOWN_TAIL


async def _as_html(page: PageRequest, chat: Chat) -> AsyncIterator[bytes]:
    services = page.services
    unconverted = 0  # formulas that could not be converted to MathML

    async def render(messages: list[StoredMessage]) -> bytes:
        nonlocal unconverted
        answers = [each for each in messages if each.role == "assistant"]
        rendered = {each.id: each for each in await services.html_cache.messages(page.owner, answers)}
        line = [rendered.get(each.id, each) for each in messages]
        html = await services.pages.html(page.request, "_export_messages.html", line=line, shared=False)
        converted, failed = await convert_formulas(html.decode())
        unconverted += failed
        return converted.encode()

    css = await asyncio.to_thread(_css)
    frame = await services.pages.html(page.request, "export.html", chat=chat, css=css)
    before, _, after = frame.partition(b"<!-- messages -->\n")
    async for rendered in _render_chunks(page, chat, render, shown=True):
        yield before + rendered
        before = b""
    note = words["export_formulas"].format(count=number(unconverted))
    yield before + (f'<p class="quiet">{escape(note)}</p>\n'.encode() if unconverted else b"") + after


async def _can_be_read(page: PageRequest, chat: Chat) -> bool:
    try:
        await page.store.messages(page.owner, chat.id)
    except StorageDamagedError:
        return False
    return True


def _css() -> Markup:
    texts = [path.read_text() for name in STYLES if (path := Path(STATIC_DIRECTORY, name)).exists()]
    return Markup("\n".join(texts))  # safe: files of this package


async def _stream_download(pieces: AsyncIterator[bytes], media_type: str, name: str) -> Response:
    first = await anext(pieces)  # read before the response starts, so that an immediate failure returns an error status

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body(), media_type=media_type, headers=headers)
