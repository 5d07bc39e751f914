"""AccessStore in SQL for SQLite and PostgreSQL. Subclasses run the transactions."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from datetime import date
from typing import Any, ClassVar, TypeVar

from notso.web.store.access import AUDIT_ENTRIES, MAX_KEYS, RESERVED_SECONDS, ApiKey, AuditEntry, UsageRow, UsageTotals
from notso.web.store.sql.database import SQLConnection, columns_of, placeholders
from notso.web.values.quotas import MaxTokenUse, Quota, Reservation, allocate_tokens

T = TypeVar("T")

_KEY = columns_of(ApiKey)
_ADD_KEY = f"INSERT INTO keys ({_KEY}, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_REVOKE = f"UPDATE keys SET revoked_ms = ? WHERE name = ? AND revoked_ms = 0 RETURNING {_KEY}"
_ADD_USAGE = """
    INSERT INTO usage (day, owner, requests, prompt_tokens, completion_tokens) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (day, owner) DO UPDATE SET
        requests = usage.requests + excluded.requests,
        prompt_tokens = usage.prompt_tokens + excluded.prompt_tokens,
        completion_tokens = usage.completion_tokens + excluded.completion_tokens
"""
_COUNTS = "requests, prompt_tokens, completion_tokens"
_USAGE = f"SELECT day, owner, {_COUNTS} FROM usage WHERE day BETWEEN ? AND ? ORDER BY day DESC, owner"
_USED = f"SELECT {_COUNTS} FROM usage WHERE day = ? AND owner = ?"
_RESERVED = """
    SELECT count(*) AS requests, coalesce(sum(tokens), 0) AS tokens FROM reservations WHERE day = ? AND owner = ?
"""
_RESERVED_MS = int(1000 * RESERVED_SECONDS)
_ENTRY = "at_ms, owner, action, address, count"
_LOGS = {False: "audit", True: "operator_audit"}
# If the log is too long, the owner with the most entries loses its oldest entry, so that one owner cannot displace the
# entries of others.
_FORGET_OLD = """
DELETE FROM {table} WHERE number IN (
    SELECT number FROM {table}
    WHERE owner = (SELECT owner FROM {table} GROUP BY owner ORDER BY count(*) DESC, min(number) LIMIT 1)
    ORDER BY number LIMIT (SELECT CASE WHEN count(*) > ? THEN 1 ELSE 0 END FROM {table})
)
"""


class SQLAccessStore(ABC):
    NOW_MS: ClassVar[str]  # SQL expression for the database's time in milliseconds
    LOCK_OWNER: ClassVar[str] = ""  # statement that locks an owner until the transaction ends, if needed

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def write(self, work: Callable[[SQLConnection], T]) -> T:
        """Run `work` in a transaction, in another thread. Changes are on disk when this returns."""

    @abstractmethod
    async def run_read(self, work: Callable[[SQLConnection], T]) -> T:
        """Run read-only `work` in another thread."""

    async def add_key(self, key: ApiKey, digest: bytes, *, by: str = "") -> bool:
        def work(db: SQLConnection) -> bool:
            if db.execute("SELECT count(*) AS n FROM keys").fetchone()["n"] >= MAX_KEYS:
                return False
            added = db.execute(_ADD_KEY, (*astuple(key), digest)).rowcount == 1
            if added and by:
                _add_entry(db, AuditEntry(key.created_ms, by, f"added the key {key.id}", by_operator=True))
            return added

        return await self.write(work)

    async def keys(self) -> list[ApiKey]:
        rows = f"SELECT {_KEY} FROM keys ORDER BY name, created_ms DESC, id"
        return await self.run_read(lambda db: [_key(row) for row in db.execute(rows)])

    async def key(self, by: str | bytes) -> ApiKey | None:
        column = "digest" if isinstance(by, bytes) else "id"
        sql = f"SELECT {_KEY} FROM keys WHERE {column} = ?"
        row = await self.run_read(lambda db: db.execute(sql, (by,)).fetchone())
        return _key(row) if row else None

    async def valid_ids(self, key_ids: Collection[str]) -> set[str]:
        sql = f"SELECT id FROM keys WHERE revoked_ms = 0 AND id IN ({placeholders(key_ids)})"
        return await self.run_read(lambda db: {row["id"] for row in db.execute(sql, tuple(key_ids))})

    async def revoke_key(self, name: str, now_ms: int, *, by: str = "") -> ApiKey | None:
        def work(db: SQLConnection) -> ApiKey | None:
            row = db.execute(_REVOKE, (max(now_ms, 1), name)).fetchone()
            if row and by:
                _add_entry(db, AuditEntry(now_ms, by, f"revoked the key {row['id']}", by_operator=True))
            return _key(row) if row else None

        return await self.write(work)

    async def add_usage(self, rows: list[UsageRow], ended: Collection[Reservation] = ()) -> None:
        # Writing in the same order on all servers prevents deadlocks.
        values = sorted(
            (row.day.isoformat(), row.owner, row.used.requests, row.used.prompt_tokens, row.used.completion_tokens)
            for row in rows
        )

        def work(db: SQLConnection) -> None:
            for each in values:
                db.execute(_ADD_USAGE, each)
            for id in sorted(each.id for each in ended):
                db.execute("DELETE FROM reservations WHERE id = ?", (id,))

        await self.write(work)

    async def reserve(
        self, day: date, owner: str, quota: Quota, requests: Sequence[MaxTokenUse]
    ) -> list[Reservation] | UsageTotals:
        day_and_owner = day.isoformat(), owner

        def work(db: SQLConnection) -> list[Reservation] | UsageTotals:
            if self.LOCK_OWNER:
                db.execute(self.LOCK_OWNER, (owner,))
            # Query reservations before usage. A reservation that ends between the two queries is then counted twice
            # rather than not at all.
            reserved = db.execute(f"{_RESERVED} AND until_ms > {self.NOW_MS}", day_and_owner).fetchone()
            used = _used(db.execute(_USED, day_and_owner).fetchone())
            left = quota.tokens - used.tokens - int(reserved["tokens"])
            answers = allocate_tokens(left, requests) if quota.tokens else [each.answer_tokens for each in requests]
            too_many = quota.requests and used.requests + reserved["requests"] + len(requests) > quota.requests
            if answers is None or too_many:
                return used
            db.execute(f"DELETE FROM reservations WHERE owner = ? AND until_ms <= {self.NOW_MS}", (owner,))
            reservations = [
                Reservation(secrets.token_hex(16), day, owner, each.prompt_tokens, answer)
                for each, answer in zip(requests, answers, strict=True)
            ]
            for each in reservations:
                db.execute(
                    "INSERT INTO reservations (id, day, owner, tokens, until_ms)"
                    f" VALUES (?, ?, ?, ?, {self.NOW_MS} + {_RESERVED_MS})",
                    (each.id, *day_and_owner, each.tokens),
                )
            return reservations

        return await self.write(work)

    async def remove_owner(self, owner: str) -> bool:
        kind, _, key_id = owner.partition(":")

        def work(db: SQLConnection) -> bool:
            deleted = 0
            for table in ("usage", "reservations", *_LOGS.values()):
                deleted += db.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,)).rowcount
            if kind == "key":
                deleted += db.execute("DELETE FROM keys WHERE id = ?", (key_id,)).rowcount
            return deleted > 0

        return await self.write(work)

    async def renew(self, reservations: Collection[Reservation]) -> None:
        renewal = f"UPDATE reservations SET until_ms = {self.NOW_MS} + {_RESERVED_MS} WHERE id = ?"

        def work(db: SQLConnection) -> None:
            for id in sorted(each.id for each in reservations):
                db.execute(f"{renewal} AND until_ms > {self.NOW_MS}", (id,))

        await self.write(work)

    async def usage(self, first: date, last: date) -> list[UsageRow]:
        days = (first.isoformat(), last.isoformat())
        return await self.run_read(
            lambda db: [
                UsageRow(date.fromisoformat(row["day"]), row["owner"], _used(row)) for row in db.execute(_USAGE, days)
            ]
        )

    async def used_on(self, day: date, owner: str) -> UsageTotals:
        return await self.run_read(lambda db: _used(db.execute(_USED, (day.isoformat(), owner)).fetchone()))

    async def add_audit(self, *entries: AuditEntry) -> None:
        def work(db: SQLConnection) -> None:
            for each in entries:
                _add_entry(db, each)

        await self.write(work)

    async def audit(self, limit: int) -> list[AuditEntry]:
        def work(db: SQLConnection) -> list[AuditEntry]:
            return [
                AuditEntry(**row, by_operator=by_operator)
                for by_operator, table in _LOGS.items()
                for row in db.execute(f"SELECT {_ENTRY} FROM {table} ORDER BY number DESC LIMIT ?", (limit,))
            ]

        return sorted(await self.run_read(work), key=lambda each: each.at_ms, reverse=True)


def _add_entry(db: SQLConnection, entry: AuditEntry) -> None:
    values = (entry.at_ms, entry.owner, entry.action, entry.address, entry.count)
    table = _LOGS[entry.by_operator]
    db.execute(f"INSERT INTO {table} ({_ENTRY}) VALUES (?, ?, ?, ?, ?)", values)
    db.execute(_FORGET_OLD.format(table=table), (AUDIT_ENTRIES,))


def _key(row: Any) -> ApiKey:
    return ApiKey(**{**row, "is_operator": bool(row["is_operator"])})


def _used(row: Any) -> UsageTotals:
    return UsageTotals(*(row[name] for name in _COUNTS.split(", "))) if row is not None else UsageTotals()
