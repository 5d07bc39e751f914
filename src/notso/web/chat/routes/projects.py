"""Routes of projects: document libraries with chats, instructions, default settings and members."""

from __future__ import annotations

from typing import Literal, cast

from fastapi import APIRouter, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import require
from notso.web.chat.routes.documents import documents_context
from notso.web.chat.views import Fields, FoundChat, FoundProject, OwnProject, Page, PageRequest, find_project
from notso.web.edge.access import GUARDED
from notso.web.sign_in.users import owner_named
from notso.web.store.documents import DEFAULT_LIBRARY, MAX_LIBRARIES_OF_OWNER, MAX_MEMBERS, Library, Member
from notso.web.turns.chat_settings import MAX_SYSTEM_PROMPT_CHARACTERS
from notso.web.values.errors import Problem
from notso.web.values.visible_text import sanitize_line
from notso.web.values.wording import number, words

router = APIRouter()

MAX_NAME_CHARACTERS = 100
SHOWN_CHATS = 200


@router.post("/projects", dependencies=[GUARDED])
async def create(page: Page, fields: Fields) -> Response:
    name = _name(fields.get("name", ""))
    project = await page.store.documents.new_library(page.owner, name) if name != DEFAULT_LIBRARY else None
    if project is None:
        raise Problem(409, words["error_project_taken"].format(name=name, limit=MAX_LIBRARIES_OF_OWNER))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.get("/projects", dependencies=[GUARDED])
async def list_projects() -> Response:
    """Redirect to the page that lists the projects."""
    return RedirectResponse("/documents", 303)


@router.get("/projects/{project_id}", dependencies=[GUARDED])
async def show_project(page: Page, project: FoundProject) -> Response:
    if page.is_fragment:
        return await page.respond("_documents.html", **await documents_context(page, project))
    return await _respond(page, project)


@router.post("/projects/{project_id}", dependencies=[GUARDED])
async def change(page: Page, project: OwnProject, fields: Fields) -> Response:
    """Rename a project or change its instructions."""
    changes: dict[str, str] = {}
    if "name" in fields:
        changes["name"] = _name(fields["name"])
    if "instructions" in fields:
        changes["instructions"] = typed = fields["instructions"].strip()
        if len(typed) > MAX_SYSTEM_PROMPT_CHARACTERS:
            length, limit = number(len(typed)), number(MAX_SYSTEM_PROMPT_CHARACTERS)
            problem = words["refused_length"].format(length=length, limit=limit)
            return await _respond(page, project, problem=problem, typed=typed)
    if not changes:
        raise Problem(400, words["error_form"])
    name = changes.get("name")
    is_changed = name != DEFAULT_LIBRARY and await page.store.documents.change_library(
        page.owner, project.id, **changes
    )
    if not is_changed and name is not None:
        raise Problem(409, words["error_project_taken"].format(name=name, limit=MAX_LIBRARIES_OF_OWNER))
    require(is_changed, words["error_unknown_project"])  # the project was deleted in the meantime
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.post("/projects/{project_id}/delete", dependencies=[GUARDED])
async def delete(page: Page, project: OwnProject, _: Fields) -> Response:
    """Permanently delete a project and its documents. Its chats are kept."""
    await page.store.documents.delete_library(page.owner, project.id)
    return RedirectResponse("/documents", 303)


@router.post("/projects/{project_id}/members", dependencies=[GUARDED])
async def set_member(page: Page, project: OwnProject, fields: Fields) -> Response:
    """Add a member, or change a member's rights. The form field `name` is a key name or user name."""
    name, rights = fields.get("name", "").strip(), fields.get("rights", "")
    if rights not in ("read", "add"):
        raise Problem(400, words["error_form"])
    shared = page.services.shared
    member = await owner_named(shared.settings, shared.accounts.store if shared.accounts is not None else None, name)
    if member is None or member == page.owner:
        raise Problem(404, words["error_member"].format(name=name[:MAX_NAME_CHARACTERS]))
    added = Member(member, name, cast(Literal["add", "read"], rights))
    if not await page.store.documents.set_member(page.owner, project.id, added):
        raise Problem(409, words["error_members"].format(limit=MAX_MEMBERS))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.post("/projects/{project_id}/members/remove", dependencies=[GUARDED])
async def remove_member(page: Page, project: FoundProject, fields: Fields) -> Response:
    """Remove a member, or leave another user's project."""
    member, is_own = fields.get("member", ""), project.rights == "own"
    if not is_own and member != page.owner:
        raise Problem(403, words["error_project_rights"])
    if not await page.store.documents.remove_member(page.owner, project.id, member):
        raise Problem(404, words["error_member"].format(name=member[:MAX_NAME_CHARACTERS]))
    return RedirectResponse(f"/projects/{project.id}" if is_own else "/documents", 303)


@router.post("/chats/{chat_id}/project", dependencies=[GUARDED])
async def move_chat(page: Page, chat: FoundChat, fields: Fields) -> Response:
    """Move a chat to a project or out of its project."""
    project_id = fields.get("project", "")
    project = (await find_project(page, project_id)).id if project_id else ""
    require(await page.store.documents.move_chat(page.owner, chat.id, project), words["error_unknown_chat"])
    page.announce(chat.id)
    return page.redirect(f"/chats/{chat.id}")


async def _respond(page: PageRequest, project: Library, *, problem: str = "", typed: str | None = None) -> Response:
    own = project.rights == "own"
    listed = await page.store.chat_list(page.owner, SHOWN_CHATS, archived=True, project=project.id)
    return await page.respond_with_sidebar(
        "project.html",
        400 if problem else 200,
        **await documents_context(page, project),
        listed_chats=listed.chats,
        members=await page.store.documents.members(page.owner, project.id) if own else [],
        own_id=page.owner,
        may_share=own and page.services.shared.accounts is not None,
        problem=problem,
        instructions=project.instructions if typed is None else typed,
    )


def _name(text: str) -> str:
    name = sanitize_line(text, MAX_NAME_CHARACTERS + 1)
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise Problem(400, words["error_title"].format(limit=MAX_NAME_CHARACTERS))
    return name
