"""Tests for every AccessStore. The test file of a store says how to create it:

class TestMine(AccessSuite):
    def make(self, folder): return MyAccessStore(...)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from web.store.some_chats import run_with_store

from notso.web.store.access import AccessStore, ApiKey, AuditEntry, UsageRow, UsageTotals
from notso.web.store.sql import access as sql_access
from notso.web.values.errors import StorageError
from notso.web.values.quotas import MaxTokenUse, Quota, Reservation

DAY = date(2026, 11, 25)
ANN = ApiKey("k1", "ann", 1_000, requests_per_minute=60, tokens_per_day=1_000, is_operator=True, requests_per_day=9)
BOB = ApiKey("k2", "bob", 2_000)


def taken(reserved: list[Reservation] | UsageTotals) -> list[Reservation]:
    """Require that the reservation succeeded, and return it."""
    assert isinstance(reserved, list), reserved
    return reserved


class AccessSuite:
    """Subclass this for each store; every test gets an empty store."""

    def make(self, folder: Path) -> AccessStore:
        """Return a store that is not open yet. Two stores for the same folder share their data."""
        raise NotImplementedError

    def run(self, folder: Path, work: Callable[[AccessStore], Awaitable[None]]) -> None:
        run_with_store(self.make(folder), work)

    def test_keys_persist_and_are_found_by_digest(self, tmp_path: Path) -> None:
        async def work(store: AccessStore) -> None:
            assert await store.keys() == []
            assert await store.add_key(BOB, b"2" * 32) and await store.add_key(ANN, b"1" * 32)
            assert await store.keys() == [ANN, BOB]
            assert (await store.key(b"1" * 32), await store.key(b"3" * 32)) == (ANN, None)
            assert (await store.key("k2"), await store.key("k3")) == (BOB, None)

        self.run(tmp_path, work)

        async def later(store: AccessStore) -> None:
            assert await store.keys() == [ANN, BOB]

        self.run(tmp_path, later)

    def test_keys_change_only_together_with_their_audit_entry(self, tmp_path: Path) -> None:
        async def work(store: Any) -> None:
            assert await store.add_key(ANN, b"1" * 32, by="olga") and not await store.add_key(ANN, b"1" * 32, by="olga")
            assert await store.revoke_key("ann", 5_000, by="olga") and not await store.revoke_key(
                "ann", 6_000, by="olga"
            )
            actions = [(each.owner, each.action, each.by_operator) for each in await store.audit(10)]
            assert sorted(actions) == [("olga", f"{verb} the key {ANN.id}", True) for verb in ("added", "revoked")]
            assert await store.add_key(BOB, b"2" * 32)
            keys = await store.keys()
            await store.write(lambda db: db.execute("ALTER TABLE operator_audit RENAME TO elsewhere") and None)
            with pytest.raises(StorageError):
                await store.add_key(replace(ANN, id="k9"), b"9" * 32, by="olga")
            with pytest.raises(StorageError):
                await store.revoke_key("bob", 5_000, by="olga")
            assert await store.keys() == keys

        self.run(tmp_path, work)

    def test_key_name_is_unique_until_revoked(self, tmp_path: Path) -> None:
        async def work(store: AccessStore) -> None:
            assert await store.add_key(ANN, b"1" * 32)
            assert not await store.add_key(replace(ANN, id="k9"), b"9" * 32)
            assert not await store.add_key(replace(BOB, id="k1"), b"8" * 32) and len(await store.keys()) == 1
            revoked = await store.revoke_key("ann", 5_000)
            assert revoked == replace(ANN, revoked_ms=5_000) == await store.key(b"1" * 32)
            assert await store.revoke_key("ann", 6_000) is None and await store.revoke_key("nobody", 1) is None
            newer = replace(ANN, id="k9", created_ms=7_000)
            assert await store.add_key(newer, b"9" * 32)
            assert await store.keys() == [newer, revoked]
            assert await store.valid_ids([newer.id, revoked.id, "unknown"]) == {newer.id}

        self.run(tmp_path, work)

    def test_usage_is_summed_by_day_and_owner(self, tmp_path: Path) -> None:
        async def work(store: AccessStore) -> None:
            assert await store.used_on(DAY, "key:k1") == UsageTotals()
            await store.add_usage(
                [UsageRow(DAY, "key:k1", UsageTotals(1, 10, 5)), UsageRow(DAY, "local", UsageTotals(2, 20, 7))]
            )
            await store.add_usage([UsageRow(DAY, "key:k1", UsageTotals(1, 1, 1))])
            await store.add_usage([UsageRow(DAY - timedelta(days=1), "local", UsageTotals(9, 9, 9))])
            await store.add_usage([])
            used = await store.used_on(DAY, "key:k1")
            assert used == UsageTotals(2, 11, 6) and used.tokens == 17
            everything = await store.usage(DAY - timedelta(days=30), DAY)
            assert [(row.day, row.owner, row.used.requests) for row in everything] == [
                (DAY, "key:k1", 2),
                (DAY, "local", 2),
                (DAY - timedelta(days=1), "local", 9),
            ]
            assert [row.owner for row in await store.usage(DAY, DAY)] == ["key:k1", "local"]

        self.run(tmp_path, work)

    def test_usage_and_reservations_stay_within_the_quota(self, tmp_path: Path) -> None:
        quota, asked = Quota(requests=3, tokens=100), MaxTokenUse(10, 50)

        async def work(store: AccessStore) -> None:
            await store.add_usage([UsageRow(DAY, "a", UsageTotals(1, 10, 10))])
            [first] = taken(await store.reserve(DAY, "a", quota, [asked]))
            assert (first.tokens, first.answer_tokens, first.owner, first.day) == (60, 50, "a", DAY)
            [second] = taken(await store.reserve(DAY, "a", quota, [asked]))
            assert second.answer_tokens == 10  # the whole rest of the quota
            # the third request exceeds the limit on requests
            assert await store.reserve(DAY, "a", quota, [MaxTokenUse(0, 0)]) == UsageTotals(1, 10, 10)
            assert len(taken(await store.reserve(DAY, "b", quota, [asked]))) == 1
            assert len(taken(await store.reserve(DAY + timedelta(days=1), "a", quota, [asked]))) == 1
            await store.add_usage([], [second])
            await store.add_usage([UsageRow(DAY, "a", UsageTotals(1, 10, 2))], [first])
            assert await store.used_on(DAY, "a") == UsageTotals(2, 20, 12)
            [third] = taken(await store.reserve(DAY, "a", quota, [MaxTokenUse(10, 500)]))
            assert third.answer_tokens == 58
            assert len(taken(await store.reserve(DAY, "a", Quota(), [asked, asked]))) == 2

        self.run(tmp_path, work)

    def test_expired_reservations_do_not_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work(store: AccessStore) -> None:
            for renewed in (True, False):
                monkeypatch.setattr(sql_access, "_RESERVED_MS", 60_000 if renewed else -1)
                held = taken(await store.reserve(DAY, "a", Quota(requests=1), [MaxTokenUse(1, 1)]))
                await store.renew(held)
                again = await store.reserve(DAY, "a", Quota(requests=1), [MaxTokenUse(1, 1)])
                assert again == UsageTotals() if renewed else len(taken(again)) == 1
                await store.add_usage([], held)

        self.run(tmp_path, work)

    def test_audit_log_is_returned_newest_first(self, tmp_path: Path) -> None:
        async def work(store: AccessStore) -> None:
            for number in range(5):
                await store.add_audit(AuditEntry(number, "local", f"action {number}", "127.0.0.1"))
            assert [entry.action for entry in await store.audit(2)] == ["action 4", "action 3"]
            assert (await store.audit(100))[-1] == AuditEntry(0, "local", "action 0", "127.0.0.1")
            many = AuditEntry(9, "nobody", "used a wrong key", "", 40)
            await store.add_audit(many, AuditEntry(8, "command line", "added the key x", by_operator=True))
            assert (await store.audit(1)) == [many, AuditEntry(8, "command line", "added the key x", by_operator=True)]

        self.run(tmp_path, work)

    def test_one_user_does_not_displace_audit_entries_of_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sql_access, "AUDIT_ENTRIES", 4)

        async def work(store: AccessStore) -> None:
            await store.add_audit(AuditEntry(0, "ann", "modest"), AuditEntry(1, "bob", "modest"))
            for number in range(2, 20):
                await store.add_audit(
                    AuditEntry(number, "eve", "much"), AuditEntry(number, "olga", "y", by_operator=True)
                )
            kept = [(each.owner, each.at_ms) for each in await store.audit(100) if not each.by_operator]
            assert kept == [("eve", 19), ("eve", 18), ("bob", 1), ("ann", 0)]

        self.run(tmp_path, work)

    def test_audit_log_and_number_of_keys_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sql_access, "AUDIT_ENTRIES", 3)
        monkeypatch.setattr(sql_access, "MAX_KEYS", 1)

        async def work(store: AccessStore) -> None:
            for number in range(8):
                await store.add_audit(AuditEntry(number, "local", "x"))
            assert [entry.at_ms for entry in await store.audit(100)] == [7, 6, 5]
            for number in range(8, 12):  # Other users' entries never displace an operator's.
                await store.add_audit(AuditEntry(number, "olga", "y", by_operator=True))
            for number in range(12, 20):
                await store.add_audit(AuditEntry(number, "local", "x"))
            assert [entry.at_ms for entry in await store.audit(100)] == [19, 18, 17, 11, 10, 9]
            assert await store.add_key(ANN, b"1" * 32) and not await store.add_key(BOB, b"2" * 32)

        self.run(tmp_path, work)

    def test_concurrent_stores_share_data_without_lost_updates(self, tmp_path: Path) -> None:
        async def both() -> None:
            first, second = self.make(tmp_path), self.make(tmp_path)
            await asyncio.gather(first.open(), second.open())
            await asyncio.gather(
                *(
                    each.add_usage([UsageRow(DAY, "local", UsageTotals(1, 1, 1))])
                    for each in (first, second)
                    for _ in range(10)
                )
            )
            assert await second.used_on(DAY, "local") == UsageTotals(20, 20, 20)
            added = await asyncio.gather(first.add_key(ANN, b"1" * 32), second.add_key(replace(ANN, id="x"), b"x" * 32))
            assert sorted(added) == [False, True]
            assert await first.revoke_key("ann", 5) is not None
            assert [key.revoked_ms for key in await second.keys()] == [5]
            await first.close()
            await second.close()

        asyncio.run(both())
