"""Routes of projects: document libraries with chats, instructions, default settings and members."""

from __future__ import annotations

from typing import Any, Literal, cast

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.routes.documents import documents_context
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import (
    Owner,
    find_chat,
    find_own_project,
    find_project,
    redirect_to,
    request_tab,
    sidebar_context,
)
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
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
async def create(request: Request, services: Services, owner: Owner) -> Response:
    name = _name((await read_form(request)).get("name", ""))
    project = await services.shared.store.documents.new_library(owner, name) if name != DEFAULT_LIBRARY else None
    if project is None:
        raise Problem(409, words["error_project_taken"].format(name=name, limit=MAX_LIBRARIES_OF_OWNER))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.get("/projects", dependencies=[GUARDED])
async def list_projects() -> Response:
    """Redirect to the page that lists the projects."""
    return RedirectResponse("/documents", 303)


@router.get("/projects/{project_id}", dependencies=[GUARDED])
async def show_project(request: Request, services: Services, owner: Owner, project_id: str) -> Response:
    project = await find_project(services, owner, project_id)
    documents = await documents_context(services, owner, project)
    if is_fragment(request):
        return await services.pages.respond(request, "_documents.html", **documents)
    return await _page(request, services, owner, project, documents)


@router.post("/projects/{project_id}", dependencies=[GUARDED])
async def change(request: Request, services: Services, owner: Owner, project_id: str) -> Response:
    """Rename a project or change its instructions."""
    project = await find_own_project(services, owner, project_id)
    fields = await read_form(request)
    changes: dict[str, str] = {}
    if "name" in fields:
        changes["name"] = _name(fields["name"])
    if "instructions" in fields:
        changes["instructions"] = fields["instructions"].strip()
        if len(changes["instructions"]) > MAX_SYSTEM_PROMPT_CHARACTERS:
            length, limit = number(len(changes["instructions"])), number(MAX_SYSTEM_PROMPT_CHARACTERS)
            problem, typed = words["refused_length"].format(length=length, limit=limit), changes["instructions"]
            documents = await documents_context(services, owner, project)
            return await _page(request, services, owner, project, documents, problem=problem, typed=typed)
    if not changes:
        raise Problem(400, words["error_form"])
    is_taken = changes.get("name") == DEFAULT_LIBRARY
    if is_taken or not await services.shared.store.documents.change_library(owner, project.id, **changes):
        raise Problem(409, words["error_project_taken"].format(name=changes["name"], limit=MAX_LIBRARIES_OF_OWNER))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.post("/projects/{project_id}/delete", dependencies=[GUARDED])
async def delete(request: Request, services: Services, owner: Owner, project_id: str) -> Response:
    """Permanently delete a project and its documents. Its chats are kept."""
    project = await find_own_project(services, owner, project_id)
    await read_form(request)
    await services.shared.store.documents.delete_library(owner, project.id)
    return RedirectResponse("/documents", 303)


@router.post("/projects/{project_id}/members", dependencies=[GUARDED])
async def set_member(request: Request, services: Services, owner: Owner, project_id: str) -> Response:
    """Add a member, or change a member's rights. The form field `name` is a key name or user name."""
    project = await find_own_project(services, owner, project_id)
    fields = await read_form(request)
    name, rights = fields.get("name", "").strip(), fields.get("rights", "")
    if rights not in ("read", "add"):
        raise Problem(400, words["error_form"])
    accounts, shared = services.shared.accounts, services.shared
    member = await owner_named(shared.settings, accounts.store if accounts is not None else None, name)
    if member is None or member == owner:
        raise Problem(404, words["error_member"].format(name=name[:MAX_NAME_CHARACTERS]))
    added = Member(member, name, cast(Literal["add", "read"], rights))
    if not await shared.store.documents.set_member(owner, project.id, added):
        raise Problem(409, words["error_members"].format(limit=MAX_MEMBERS))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.post("/projects/{project_id}/members/remove", dependencies=[GUARDED])
async def remove_member(request: Request, services: Services, owner: Owner, project_id: str) -> Response:
    project = await find_own_project(services, owner, project_id)
    member = (await read_form(request)).get("member", "")
    if not await services.shared.store.documents.remove_member(owner, project.id, member):
        raise Problem(404, words["error_member"].format(name=member[:MAX_NAME_CHARACTERS]))
    return RedirectResponse(f"/projects/{project.id}", 303)


@router.post("/chats/{chat_id}/project", dependencies=[GUARDED])
async def move_chat(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """Move a chat to a project or out of its project."""
    chat = await find_chat(services, owner, chat_id)
    project_id = (await read_form(request)).get("project", "")
    project = (await find_project(services, owner, project_id)).id if project_id else ""
    if not await services.shared.store.documents.move_chat(owner, chat.id, project):
        raise Problem(404, words["error_unknown_chat"])
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return redirect_to(request, f"/chats/{chat.id}")


async def _page(
    request: Request,
    services: ChatServices,
    owner: str,
    project: Library,
    documents: dict[str, Any],
    *,
    problem: str = "",
    typed: str | None = None,
) -> Response:
    store = services.shared.store
    own = project.rights == "own"
    return await services.pages.respond(
        request,
        "project.html",
        400 if problem else 200,
        **await sidebar_context(services, owner),
        **documents,
        listed_chats=(await store.chat_list(owner, SHOWN_CHATS, archived=True, project=project.id)).chats,
        members=await store.documents.members(owner, project.id) if own else [],
        may_share=own and services.shared.accounts is not None,
        problem=problem,
        instructions=project.instructions if typed is None else typed,
    )


def _name(text: str) -> str:
    name = sanitize_line(text, MAX_NAME_CHARACTERS + 1)
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise Problem(400, words["error_title"].format(limit=MAX_NAME_CHARACTERS))
    return name
