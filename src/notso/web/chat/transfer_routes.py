"""Chats as files, out and in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from markupsafe import Markup
from starlette.responses import FileResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from notso.web.access import guarded
from notso.web.assets import STATIC_DIRECTORY
from notso.web.chat.export import export_json, export_markdown, file_name
from notso.web.chat.imports import read_chats
from notso.web.chat.questions import title_of
from notso.web.chat.views import Owner, Shared, find_chat, tab_of
from notso.web.errors import StorageDamagedError
from notso.web.forms import FORM_TYPE, read_form
from notso.web.ids import new_id
from notso.web.pages import is_fragment
from notso.web.problems import Problem
from notso.web.store.tree import shown_path
from notso.web.wording import words

router = APIRouter(dependencies=[Depends(guarded)])

Kind = Literal["md", "json", "html"]
STYLES = ("surfaces.css", "text.css", "messages.css")


@router.get("/chats/{chat_id}/export/{kind}")
async def export_chat(request: Request, state: Shared, owner: Owner, chat_id: str, kind: Kind) -> Response:
    """One chat: Markdown or a still page of the shown branch, or JSON of all of it."""
    chat = await find_chat(state, owner, chat_id)
    messages = await state.store.messages(owner, chat.id)
    path = shown_path(messages, chat.chosen_root)
    name = file_name(chat, kind)
    if kind == "md":
        text = await asyncio.to_thread(export_markdown, chat, [shown.message for shown in path])
        return _download(text, "text/markdown; charset=utf-8", name)
    if kind == "json":
        return _download(await asyncio.to_thread(_json, export_json, [(chat, messages)]), "application/json", name)
    path = await state.kept_html.path(path, questions=False)
    page = await state.pages.respond(request, "export.html", chat=chat, path=path, css=await asyncio.to_thread(_css))
    return _download(bytes(page.body), "text/html; charset=utf-8", name)


@router.get("/export")
async def export_all(state: Shared, owner: Owner) -> Response:
    """Every chat, as JSON; of a damaged database those that can be read, and the file's name says if not all can."""
    chats, name = [], "notso-chats.json"
    for chat in await state.store.chats(owner):
        try:
            chats.append((chat, await state.store.messages(owner, chat.id)))
        except StorageDamagedError:
            name = "notso-chats-not-all.json"
    return _download(await asyncio.to_thread(_json, export_json, chats), "application/json", name)


@router.get("/backup")
async def backup(state: Shared) -> Response:
    """All there is, as a file that can stand in the database's place. One at a time: each is as large again."""
    if state.backing_up.locked():
        raise Problem(429, words["error_backing_up"], retry_after_seconds=10)
    await state.backing_up.acquire()
    copy = state.settings.directory / f"backup-{new_id()}.db"
    try:
        await state.store.backup(copy)
    except BaseException:
        copy.unlink(missing_ok=True)
        state.backing_up.release()
        raise
    name = f"notso-backup-{date.today().isoformat()}.db"
    return _PassingFile(state.backing_up, copy, media_type="application/vnd.sqlite3", filename=name)


@router.post("/import")
async def import_chats(request: Request, state: Shared, owner: Owner) -> Response:
    """Chats from a file: our own export, or a list of messages. What is there already is never touched."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        body = await request.body()
    elif kind == FORM_TYPE:
        body = (await read_form(request)).get("json", "").encode("utf-8", "surrogatepass")
    else:
        raise Problem(415, words["import_unknown"])
    chats = await asyncio.to_thread(read_chats, body, title_of)
    for chat, messages in chats:
        await state.store.add_chat(owner, chat, messages)
        state.feed.announce(owner, chat.id, tab_of(request), turns=False)
    address = f"/chats/{chats[0][0].id}"
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


class _PassingFile(FileResponse):
    """A file that is gone once it was sent, or its reader was; then `held` is released."""

    def __init__(self, held: asyncio.Lock, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.release()
            await asyncio.to_thread(Path(self.path).unlink, missing_ok=True)


def _json(make: Callable[..., object], chats: object) -> bytes:
    return json.dumps(make(chats), ensure_ascii=False, indent=1).encode()


def _css() -> Markup:
    texts = [path.read_text() for name in STYLES if (path := Path(STATIC_DIRECTORY, name)).exists()]
    return Markup("\n".join(texts))  # our own files


def _download(body: bytes | str, media_type: str, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(body, media_type=media_type, headers=headers)
