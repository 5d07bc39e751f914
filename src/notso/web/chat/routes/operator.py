"""The operator's page: keys, usage per key and user, and the audit log. It shows no chat content."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.services import ChatServices, Services
from notso.web.chat.views import Owner, sidebar_context
from notso.web.edge.access import operator_only
from notso.web.edge.forms import read_form
from notso.web.sign_in.accounts import Accounts
from notso.web.sign_in.issued_keys import MAX_NAME_CHARACTERS, digest_of, is_name, new_key, owner_of_key
from notso.web.sign_in.users import remove_user, revoke_key_of, user_named
from notso.web.store.access import AuditEntry
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem, SettingsError
from notso.web.values.wording import words

router = APIRouter()

DAYS = 30
LIMITS = ("requests_per_minute", "requests_per_day", "tokens_per_day")
MAX_ROWS, MAX_ENTRIES = 500, 200
STOP_ROUNDS, STOP_SECONDS = 50, 0.1  # retries while stopping the requests of a user to be removed


@router.get("/operator", dependencies=[operator_only(audit="looked at the operator's page")])
async def operator_page(request: Request, services: Services, owner: Owner) -> Response:
    return await _page(request, services, owner)


@router.post("/operator/keys", dependencies=[operator_only()])
async def create_key(request: Request, services: Services, owner: Owner) -> Response:
    """Create a key and show its secret once."""
    accounts = _accounts(services)
    fields = await read_form(request)
    name, limits = fields.get("name", "").strip(), [fields.get(limit, "").strip() for limit in LIMITS]
    if not all(limit == "" or (limit.isascii() and limit.isdecimal() and len(limit) < 16) for limit in limits):
        return await _page(request, services, owner, problem=words["error_key_limit"])
    chosen = {limit: int(value or 0) for limit, value in zip(LIMITS, limits, strict=True)}
    secret, key = new_key(name, **chosen, is_operator="is_operator" in fields)
    if not is_name(name) or not await accounts.store.add_key(key, digest_of(secret), by=owner):
        return await _page(request, services, owner, problem=words["error_key_name"].format(limit=MAX_NAME_CHARACTERS))
    return await _page(request, services, owner, secret=secret)


@router.post("/operator/keys/revoke", dependencies=[operator_only()])
async def revoke_key(request: Request, services: Services, owner: Owner) -> Response:
    accounts = _accounts(services)
    name = (await read_form(request)).get("name", "")
    if await accounts.store.revoke_key(name, current_ms(), by=owner) is None:
        raise Problem(404, words["error_unknown_page"])
    return RedirectResponse("/operator", 303)


@router.post("/operator/users/remove", dependencies=[operator_only()])
async def remove(request: Request, services: Services, owner: Owner) -> Response:
    """Permanently delete a user's key, chats, documents and usage."""
    accounts, shared = _accounts(services), services.shared
    name = (await read_form(request)).get("name", "").strip()
    try:
        user = await user_named(accounts.store, name)
    except SettingsError as error:
        return await _page(request, services, owner, problem=str(error))
    if user == owner:
        return await _page(request, services, owner, problem=words["error_remove_self"])
    await revoke_key_of(accounts.store, user)
    for _ in range(STOP_ROUNDS):  # a running request would store its answer after the removal
        if not shared.requests.stop_owner(user):
            break
        await asyncio.sleep(STOP_SECONDS)
    await accounts.forget(user)
    try:
        await remove_user(shared.store, accounts.store, user, owner)
    except SettingsError as error:  # nothing is stored: the name may be misspelled
        return await _page(request, services, owner, problem=str(error))
    return RedirectResponse("/operator", 303)


def _accounts(services: ChatServices) -> Accounts:
    if services.shared.accounts is None:
        raise Problem(404, words["error_no_accounts"])
    return services.shared.accounts


async def _page(
    request: Request, services: ChatServices, owner: str, *, problem: str = "", secret: str = ""
) -> Response:
    accounts = _accounts(services)
    await accounts.flush()
    today = accounts.today()
    rows = await accounts.store.usage(today - timedelta(days=DAYS - 1), today)
    keys = await accounts.store.keys()
    names = {owner_of_key(key.id): key.name for key in keys}
    log = await accounts.store.audit(MAX_ENTRIES)
    response = await services.pages.respond(
        request,
        "operator.html",
        400 if problem else 200,
        **await sidebar_context(services, owner),
        rows=[(row.day.isoformat(), names.get(row.owner, row.owner), row.used) for row in rows[:MAX_ROWS]],
        used_today={row.owner: row.used.tokens for row in rows if row.day == today},
        keys=[(key, owner_of_key(key.id)) for key in keys],
        entries=[(_format_time(entry), names.get(entry.owner, entry.owner), entry) for entry in log],
        problem=problem,
        secret=secret,
    )
    if secret:  # the secret is shown only once, so the browser must not cache the page
        response.headers["Cache-Control"] = "no-store"
    return response


def _format_time(entry: AuditEntry) -> str:
    return datetime.fromtimestamp(entry.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
