"""The operator's page: keys, usage per key and user, and the audit log. It shows no chat content."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import require
from notso.web.chat.views import Fields, Page, PageRequest
from notso.web.edge.access import operator_only
from notso.web.sign_in.accounts import Accounts
from notso.web.sign_in.issued_keys import MAX_NAME_CHARACTERS, digest_of, is_name, new_key, owner_of_key
from notso.web.sign_in.users import remove_user, revoke_key_of, user_named
from notso.web.store.access import AuditEntry
from notso.web.values.durations import current_ms
from notso.web.values.errors import SettingsError
from notso.web.values.wording import words

router = APIRouter()

DAYS = 30
LIMITS = ("requests_per_minute", "requests_per_day", "tokens_per_day")
MAX_ROWS, MAX_ENTRIES = 500, 200
STOP_ROUNDS, STOP_SECONDS = 50, 0.1  # number and interval of attempts to stop the requests of a user to be removed


async def _accounts(page: Page) -> Accounts:
    return require(page.services.shared.accounts, words["error_no_accounts"])


AccountsOfServer = Annotated[Accounts, Depends(_accounts)]


@router.get("/operator", dependencies=[operator_only(audit="looked at the operator's page")])
async def operator_page(page: Page) -> Response:
    return await _respond(page)


@router.post("/operator/keys", dependencies=[operator_only()])
async def create_key(page: Page, accounts: AccountsOfServer, fields: Fields) -> Response:
    """Create a key and show its secret once."""
    name, limits = fields.get("name", "").strip(), [fields.get(limit, "").strip() for limit in LIMITS]
    if not all(limit == "" or (limit.isascii() and limit.isdecimal() and len(limit) < 16) for limit in limits):
        return await _respond(page, problem=words["error_key_limit"])
    chosen = {limit: int(value or 0) for limit, value in zip(LIMITS, limits, strict=True)}
    secret, key = new_key(name, **chosen, is_operator="is_operator" in fields)
    if not is_name(name) or not await accounts.store.add_key(key, digest_of(secret), by=page.owner):
        return await _respond(page, problem=words["error_key_name"].format(limit=MAX_NAME_CHARACTERS))
    return await _respond(page, secret=secret)


@router.post("/operator/keys/revoke", dependencies=[operator_only()])
async def revoke_key(page: Page, accounts: AccountsOfServer, fields: Fields) -> Response:
    require(await accounts.store.revoke_key(fields.get("name", ""), current_ms(), by=page.owner))
    return RedirectResponse("/operator", 303)


@router.post("/operator/users/remove", dependencies=[operator_only()])
async def remove(page: Page, accounts: AccountsOfServer, fields: Fields) -> Response:
    """Permanently delete a user's key, chats, documents and usage."""
    try:
        user = await user_named(accounts.store, fields.get("name", "").strip())
    except SettingsError as error:
        return await _respond(page, problem=str(error))
    if user == page.owner:
        return await _respond(page, problem=words["error_remove_self"])
    await revoke_key_of(accounts.store, user)
    for _ in range(STOP_ROUNDS):  # a running request would store its answer after the removal
        if not page.services.shared.requests.stop_owner(user):
            break
        await asyncio.sleep(STOP_SECONDS)
    await accounts.forget(user)
    try:
        await remove_user(page.store, accounts.store, user, page.owner)
    except SettingsError as error:  # no data of this user is stored: the name may be misspelled
        return await _respond(page, problem=str(error))
    return RedirectResponse("/operator", 303)


async def _respond(page: PageRequest, *, problem: str = "", secret: str = "") -> Response:
    accounts = await _accounts(page)
    await accounts.flush()
    today = accounts.today()
    rows = await accounts.store.usage(today - timedelta(days=DAYS - 1), today)
    keys = await accounts.store.keys()
    names = {owner_of_key(key.id): key.name for key in keys}
    log = await accounts.store.audit(MAX_ENTRIES)
    response = await page.respond_with_sidebar(
        "operator.html",
        400 if problem else 200,
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
