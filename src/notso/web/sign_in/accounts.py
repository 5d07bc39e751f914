"""Count usage, enforce the rate limits and quotas of API keys, and write the audit log. Use on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta

from fastapi import Request
from limits import RateLimitItemPerMinute

from notso.smollm3 import Usage
from notso.web.edge.access import NOBODY, Caller, mark_of
from notso.web.edge.errors import is_api
from notso.web.edge.rate_limit import Counters
from notso.web.store.access import AccessStore, AuditEntry, UsageRow, UsageTotals
from notso.web.values.errors import Problem, QuotaError, StorageError
from notso.web.values.quotas import MaxTokenUse, Quota, Reservation
from notso.web.values.wording import number, words

FLUSH_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
"""Maximum time that a request waits for other requests to release their reservations."""
CHECK_SECONDS = 0.5
"""Interval at which a waiting request checks the store for reservations that other servers have released."""
RETRY_SECONDS = 5
RENEW_SECONDS = 20.0
MAX_PENDING = 10_000
"""Maximum number of (day, owner) usage entries and of audited (owner, action) pairs kept in memory. If the store fails
for so long that usage entries reach this limit, the usage of further owners is not counted."""
AUDIT_SECONDS, SELDOM = 60.0, {"reached its quota": 3600.0}
"""For this long after an audit entry, repetitions of the same action by the same owner are only counted. Then, one
entry with the number of repetitions is written. SELDOM contains longer times for some actions."""
KEY_REQUESTS = "requests of keys"
_log = logging.getLogger("notso.web.access")


class Accounts:
    """Records usage and enforces quotas."""

    # Usage is written every few seconds. If the owner has a quota, each request first reserves tokens in the store: the
    # maximum that it can use, or the rest of the quota if that is less. Thus, several servers together cannot exceed
    # the quota.

    # `counters` count the requests of each key. All servers share them if Valkey is configured. `clock` returns Unix
    # time.
    def __init__(self, store: AccessStore, counters: Counters, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._counters = counters
        self._clock = clock
        self._pending: dict[tuple[date, str], UsageTotals] = {}
        self._quotas: dict[str, Quota] = {}
        self._turns: dict[str, asyncio.Lock] = {}  # the requests of an owner reserve tokens in order of arrival
        self._reserved: dict[str, Reservation] = {}
        self._released: dict[str, Reservation] = {}
        self._renewed = 0.0
        self._freed = asyncio.Event()
        self._flush_due = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        # (owner, action) -> time of the last entry (monotonic clock), and number of repetitions since then
        self._audited: dict[tuple[str, str], tuple[float, int]] = {}
        self._unwritten: list[AuditEntry] = []

    async def start(self) -> None:
        await self.store.open()
        # Usage is written periodically, because a server that is killed loses unwritten usage.
        self._task = asyncio.create_task(self._write_periodically())

    async def _write_periodically(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._flush_due.wait()
            self._flush_due.clear()
            await self.flush()
            await self._renew()

    def today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def has_quota(self, owner: str) -> bool:
        return owner in self._quotas

    async def reserve(self, owner: str, uses: Sequence[MaxTokenUse]) -> list[Reservation]:
        """Reserve tokens, up to the maximum use of each request; wait for other requests if necessary. Raises
        QuotaError, StorageError, or Problem if the user is removed meanwhile."""
        turn, clock = self._turns.setdefault(owner, asyncio.Lock()), asyncio.get_running_loop().time
        deadline = clock() + PATIENCE_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                await turn.acquire()
        except TimeoutError:
            reserved = await self._try_reserve(owner, uses)
        else:
            try:
                while True:
                    self._freed.clear()
                    reserved = await self._try_reserve(owner, uses)
                    if reserved is not None or clock() >= deadline:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(min(deadline, clock() + CHECK_SECONDS)):
                            await self._freed.wait()
            finally:
                turn.release()
        if reserved is None:
            message = words["error_key_held"].format(seconds=RETRY_SECONDS)
            raise QuotaError(message, retry_after_seconds=RETRY_SECONDS)
        return reserved

    async def _try_reserve(self, owner: str, uses: Sequence[MaxTokenUse]) -> list[Reservation] | None:
        # Returns None if other requests have reserved too much of the quota. Raises QuotaError if the quota would be
        # insufficient even without their reservations.
        quota, day = self._quotas.get(owner), self.today()
        if quota is None:  # the user was removed while the request waited
            raise Problem(401, words["error_key"])
        future = asyncio.ensure_future(self.store.reserve(day, owner, quota, uses))
        try:
            found = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._release_unclaimed)  # the canceled caller will not release the reservations
            raise
        if isinstance(found, list):
            self._reserved |= {each.id: each for each in found}
            return found
        if message := _exceeded(quota, found, UsageTotals(len(uses), sum(map(_least_tokens, uses)))):
            raise QuotaError(message, retry_after_seconds=self._until_tomorrow())
        return None

    def _release_unclaimed(self, future: asyncio.Future[list[Reservation] | UsageTotals]) -> None:
        if not future.cancelled() and future.exception() is None and isinstance(found := future.result(), list):
            self.release(found)

    async def allows(self, owner: str, prompt_tokens: int) -> bool:
        quota = self._quotas[owner]
        try:
            used = await self.used_today(owner)
        except StorageError:
            return False
        return _exceeded(quota, used, UsageTotals(1, prompt_tokens, 1)) is None

    def ended(self, owner: str, usage: Usage | None, reservation: Reservation | None) -> None:
        key = (reservation.day if reservation is not None else self.today(), owner)
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)
        if key in self._pending or len(self._pending) < MAX_PENDING:
            self._pending[key] = self._pending.get(key, UsageTotals()) + UsageTotals(1, *tokens)
        if reservation is not None:
            self.release([reservation])

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._released |= {each.id: each for each in reservations}
        self._flush_due.set()

    async def flush(self) -> None:
        """Write audit entries and usage; on failure, keep the usage for the next call."""
        await self._write_audit()
        async with self._writing:
            pending, self._pending = self._pending, {}
            released, self._released = self._released, {}
            if not pending and not released:
                return
            rows = [UsageRow(day, owner, used) for (day, owner), used in pending.items()]
            try:
                await self.store.add_usage(rows, list(released.values()))
            except (StorageError, RuntimeError) as error:  # RuntimeError: no thread could be started
                _log.warning("usage cannot be written and is kept for now: %s", error)
                for key, used in pending.items():
                    self._pending[key] = self._pending.get(key, UsageTotals()) + used
                self._released |= released
                return
            for each in released:
                self._reserved.pop(each, None)
            self._freed.set()

    async def forget(self, owner: str) -> None:
        await self.flush()
        async with self._writing:
            for key in [each for each in self._pending if each[1] == owner]:
                del self._pending[key]
            self._quotas.pop(owner, None)
            self._turns.pop(owner, None)
            for action in [each for each in self._audited if each[0] == owner]:
                del self._audited[action]

    async def _renew(self) -> None:
        # Reservations in the store expire after a while, because a killed server cannot release its reservations.
        # Therefore, extend the reservations of running requests.
        now = time.monotonic()
        if not self._reserved or now - self._renewed < RENEW_SECONDS:
            return
        self._renewed = now
        try:
            await self.store.renew(list(self._reserved.values()))
        except (StorageError, RuntimeError) as error:
            _log.warning("quota reservations cannot be renewed: %s", error)

    async def close(self) -> None:
        self._closing = True
        self._flush_due.set()
        if self._task is not None:  # wait, because canceling the task would lose the usage that it is writing
            await asyncio.wait({self._task})
        await self._write_audit(all_of_it=True)
        await self.flush()
        await self.store.close()

    async def used_today(self, owner: str) -> UsageTotals:
        """Return today's usage, including usage not yet written. Raises StorageError."""
        async with self._writing:
            day = self.today()
            return await self.store.used_on(day, owner) + self._pending.get((day, owner), UsageTotals())

    async def __call__(self, request: Request, caller: Caller) -> None:
        """Check the limits of the caller's key, and audit the request. Raises QuotaError or StorageError."""
        quota = Quota(caller.requests_per_day, caller.tokens_per_day)
        has_quota = quota != Quota()
        if has_quota:
            self._quotas[caller.owner] = quota
        if action := mark_of(request.scope["route"]).audit:
            await self.audit(caller.owner, action, request, by_operator=caller.is_operator)
        if not caller.key_id or not _uses_model(request):
            return
        limit = RateLimitItemPerMinute(caller.requests_per_minute) if caller.requests_per_minute else None
        if limit is not None and not await self._counters.hit(limit, KEY_REQUESTS, caller.owner):
            free_at = await self._counters.free_at(limit, KEY_REQUESTS, caller.owner)
            seconds = min(60, max(1, math.ceil(free_at - time.time())))
            message = words["error_key_rate"].format(limit=number(limit.amount), seconds=seconds)
            raise QuotaError(message, retry_after_seconds=seconds)
        if has_quota and (reason := _exceeded(quota, await self.used_today(caller.owner), UsageTotals(1, 1))):
            await self.audit(caller.owner, "reached its quota", request)
            raise QuotaError(reason, retry_after_seconds=self._until_tomorrow())

    async def audit(self, owner: str, action: str, request: Request, *, by_operator: bool = False) -> None:
        """Record an action in the audit log. Failures are only logged."""
        # Each action of an operator is written at once, to a separate log that other users cannot fill up. Repetitions
        # of an action by other users are only counted (see AUDIT_SECONDS). Entries of unauthenticated requests are
        # collected and written together, because any client can cause them.
        address = request.client.host if request.client else ""
        entry = AuditEntry(int(1000 * self._clock()), owner, action, address, by_operator=by_operator)
        if not by_operator:
            key = owner, action
            began, count = self._audited.get(key, (0.0, 0))
            if began and time.monotonic() - began < SELDOM.get(action, AUDIT_SECONDS):
                self._audited[key] = began, count + 1
                return
            if len(self._audited) >= MAX_PENDING:
                return
            self._unwritten += self._repetitions(key)
            self._audited[key] = time.monotonic(), 0
            if owner == NOBODY.owner:
                self._unwritten.append(entry)
                return
        await self._add_audit(entry)

    def _repetitions(self, key: tuple[str, str]) -> list[AuditEntry]:
        _, count = self._audited.pop(key, (0.0, 0))
        return [AuditEntry(int(1000 * self._clock()), *key, count=count)] if count else []

    async def _write_audit(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        expired = [
            key
            for key, (began, _) in self._audited.items()
            if all_of_it or now - began >= SELDOM.get(key[1], AUDIT_SECONDS)
        ]
        entries = [*self._unwritten, *(each for key in expired for each in self._repetitions(key))]
        self._unwritten = []
        if entries:
            await self._add_audit(*entries)

    async def _add_audit(self, *entries: AuditEntry) -> None:
        try:
            await self.store.add_audit(*entries)
        except (StorageError, RuntimeError) as error:
            _log.warning("the audit log cannot be written: %s", error)

    def _until_tomorrow(self) -> int:
        now = datetime.fromtimestamp(self._clock(), UTC)
        midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), UTC)
        return math.ceil((midnight - now).total_seconds())


def _exceeded(quota: Quota, used: UsageTotals, more: UsageTotals) -> str | None:
    # Return a message for the user if the quota does not suffice for `more`.
    for wording, amount, least, limit in (
        (words["error_key_quota"], used.tokens, more.tokens, quota.tokens),
        (words["error_key_requests"], used.requests, more.requests, quota.requests),
    ):
        if limit and amount + least > limit:
            return wording.format(used=number(amount), limit=number(limit))
    return None


def _least_tokens(use: MaxTokenUse) -> int:
    # Every generated answer has at least one token. If `answer_tokens` is 0, nothing is generated.
    return use.prompt_tokens + min(1, use.answer_tokens)


def _uses_model(request: Request) -> bool:
    if is_api(request.scope):
        return request.method == "POST"
    return mark_of(request.scope["route"]).uses_model
