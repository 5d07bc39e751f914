"""The operator's page: usage per key and user, keys and audit log, but no content."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request, Response

from notso.web.chat.services import Services
from notso.web.edge.access import operator_only
from notso.web.sign_in.given_keys import owner_of_key
from notso.web.store.access import AuditEntry
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter()

DAYS = 30
MAX_ROWS, MAX_ENTRIES = 500, 200


@router.get("/operator", dependencies=[operator_only(audit="looked at the operator's page")])
async def operator_page(request: Request, services: Services) -> Response:
    """Show the page, to operators only."""
    accounts = services.shared.accounts
    if accounts is None:
        raise Problem(404, words["error_no_accounts"])
    await accounts.flush()
    today = accounts.today()
    rows = await accounts.store.usage(today - timedelta(days=DAYS - 1), today)
    keys = await accounts.store.keys()
    names = {owner_of_key(key.id): key.name for key in keys}
    return await services.pages.respond(
        request,
        "operator.html",
        rows=[(row.day.isoformat(), names.get(row.owner, row.owner), row.used) for row in rows[:MAX_ROWS]],
        used_today={row.owner: row.used.tokens for row in rows if row.day == today},
        keys=[(key, owner_of_key(key.id)) for key in keys],
        entries=[(_when(entry), names.get(entry.owner, entry.owner), entry) for entry in await _log(services)],
    )


async def _log(services: Services) -> list[AuditEntry]:
    accounts = services.shared.accounts
    return await accounts.store.audit(MAX_ENTRIES) if accounts is not None else []


def _when(entry: AuditEntry) -> str:
    return datetime.fromtimestamp(entry.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
