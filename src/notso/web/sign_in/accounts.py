"""Usage accounting, limits and quotas of keys, and the audit log. Use on the event loop."""

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

from notso.web.edge.access import NOBODY, Caller, mark_of
from notso.web.edge.errors import is_api
from notso.web.edge.rate_limit import Counters
from notso.web.engine.port import Usage
from notso.web.store.access import AccessStore, AuditEntry, UsageRow, Used
from notso.web.values.errors import Problem, QuotaError, StorageError
from notso.web.values.quotas import Quota, Reservation, Wanted
from notso.web.values.wording import number, words

FLUSH_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
"""Maximum wait of a request for reservations of other requests to be released."""
LOOK_SECONDS = 0.5
"""Polling interval for reservations released by other servers."""
RETRY_SECONDS = 5
RENEW_SECONDS = 20.0
MAX_PENDING = 10_000
"""Limit of unwritten (day, owner) entries; if the store fails for longer, further usage is not counted."""
AUDIT_SECONDS, SELDOM = 60.0, {"reached its quota": 3600.0}
"""Intervals in which repetitions of an owner's action are counted, to be written as one entry."""
KEY_REQUESTS = "requests of keys"
ASKING = frozenset({"chats", "messages", "regenerate", "continue", "summarize", "edit"})
"""Last path segments of page requests that use the model."""
_log = logging.getLogger("notso.web.access")


class Accounts:
    """Accounts for usage and enforces quotas.

    Usage is written every few seconds. The maximum use of a request with a quota is reserved in the store before it
    starts, and settled in one transaction, so that even several servers cannot exceed a quota.
    """

    # counters: count requests per key, shared between servers if configured. clock: seconds since 1970.
    def __init__(self, store: AccessStore, counters: Counters, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._counters = counters
        self._clock = clock
        self._pending: dict[tuple[date, str], Used] = {}
        self._quotas: dict[str, Quota] = {}
        self._turns: dict[str, asyncio.Lock] = {}  # an owner's requests wait for reservations in order
        self._reserved: dict[str, Reservation] = {}
        self._ended: dict[str, Reservation] = {}
        self._renewed = 0.0
        self._freed = asyncio.Event()
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._audited: dict[tuple[str, str], tuple[float, int]] = {}  # time of the written entry, repetitions since
        self._unwritten: list[AuditEntry] = []

    async def start(self) -> None:
        await self.store.open()
        # A server that is killed loses at most FLUSH_SECONDS of usage.
        self._task = asyncio.create_task(self._write_now_and_then())

    async def _write_now_and_then(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._due.wait()
            self._due.clear()
            await self.flush()
            await self._renew()

    def today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def has_quota(self, owner: str) -> bool:
        return owner in self._quotas

    async def reserve(self, owner: str, wanted: Sequence[Wanted]) -> list[Reservation]:
        """Reserve the requests' maximum use, waiting for other reservations. Raises QuotaError or StorageError."""
        turn, clock = self._turns.setdefault(owner, asyncio.Lock()), asyncio.get_running_loop().time
        deadline = clock() + PATIENCE_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                await turn.acquire()
        except TimeoutError:
            reserved = await self._try(owner, wanted)
        else:
            try:
                while True:
                    self._freed.clear()
                    reserved = await self._try(owner, wanted)
                    if reserved is not None or clock() >= deadline:
                        break
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(min(deadline, clock() + LOOK_SECONDS)):
                            await self._freed.wait()
            finally:
                turn.release()
        if reserved is None:
            message = words["error_key_held"].format(seconds=RETRY_SECONDS)
            raise QuotaError(message, retry_after_seconds=RETRY_SECONDS)
        return reserved

    async def _try(self, owner: str, wanted: Sequence[Wanted]) -> list[Reservation] | None:
        # Raises QuotaError if the quota would not suffice even without other reservations.
        quota, day = self._quotas[owner], self.today()
        asked = asyncio.ensure_future(self.store.reserve(day, owner, quota, wanted))
        try:
            found = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)  # the canceled caller cannot release it
            raise
        if isinstance(found, list):
            self._reserved |= {each.id: each for each in found}
            return found
        for wording, amount, least, limit in (
            (words["error_key_quota"], found.tokens, sum(map(_least, wanted)), quota.tokens),
            (words["error_key_requests"], found.requests, len(wanted), quota.requests),
        ):
            if limit and amount + least > limit:
                message = wording.format(used=number(amount), limit=number(limit))
                raise QuotaError(message, retry_after_seconds=self._until_tomorrow())
        return None

    def _give_back(self, asked: asyncio.Future[list[Reservation] | Used]) -> None:
        if not asked.cancelled() and asked.exception() is None and isinstance(found := asked.result(), list):
            self.release(found)

    async def allows(self, owner: str, prompt_tokens: int) -> bool:
        quota = self._quotas[owner]
        try:
            used = await self.used_today(owner)
        except StorageError:
            return False
        too_long = quota.tokens and used.tokens + prompt_tokens >= quota.tokens
        return not too_long and (not quota.requests or used.requests < quota.requests)

    def ended(self, owner: str, usage: Usage | None, reservation: Reservation | None) -> None:
        key = (reservation.day if reservation is not None else self.today(), owner)
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)
        if key in self._pending or len(self._pending) < MAX_PENDING:
            self._pending[key] = self._pending.get(key, Used()) + Used(1, *tokens)
        if reservation is not None:
            self.release([reservation])

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._ended |= {each.id: each for each in reservations}
        self._due.set()

    async def flush(self) -> None:
        """Write collected usage; retry later on failure."""
        await self._write_audit()
        async with self._writing:
            taken, self._pending = self._pending, {}
            ended, self._ended = self._ended, {}
            if not taken and not ended:
                return
            rows = [UsageRow(day, owner, used) for (day, owner), used in taken.items()]
            try:
                await self.store.add_usage(rows, list(ended.values()))
            except (StorageError, RuntimeError) as error:  # RuntimeError: no thread could be started
                _log.warning("usage cannot be written and is kept for now: %s", error)
                for key, used in taken.items():
                    self._pending[key] = self._pending.get(key, Used()) + used
                self._ended |= ended
                return
            for each in ended:
                self._reserved.pop(each, None)
            self._freed.set()

    async def forget(self, owner: str) -> None:
        await self.flush()
        async with self._writing:
            for key in [each for each in self._pending if each[1] == owner]:
                del self._pending[key]
            self._quotas.pop(owner, None)
            for action in [each for each in self._audited if each[0] == owner]:
                del self._audited[action]

    async def _renew(self) -> None:
        # Reservations expire in the store; those of running requests are extended.
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
        self._due.set()
        if self._task is not None:  # not canceled, because what it is writing would be lost
            await asyncio.wait({self._task})
        await self._write_audit(all_of_it=True)
        await self.flush()
        await self.store.close()

    async def used_today(self, owner: str) -> Used:
        """Return today's use, including unwritten use. Raises StorageError."""
        async with self._writing:
            day = self.today()
            return await self.store.used_on(day, owner) + self._pending.get((day, owner), Used())

    async def __call__(self, request: Request, caller: Caller) -> None:
        """Check a key's limits and record audited actions. Raises Problem (429) or StorageError."""
        if caller.tokens_per_day or caller.requests_per_day:
            self._quotas[caller.owner] = Quota(caller.requests_per_day, caller.tokens_per_day)
        if action := mark_of(request.scope["route"]).audit:
            await self.audit(caller.owner, action, request, by_operator=caller.is_operator)
        if not caller.key_id or not _asks_the_model(request):
            return
        limit = RateLimitItemPerMinute(caller.requests_per_minute) if caller.requests_per_minute else None
        if limit is not None and not await self._counters.hit(limit, KEY_REQUESTS, caller.owner):
            free_at = await self._counters.free_at(limit, KEY_REQUESTS, caller.owner)
            seconds = min(60, max(1, math.ceil(free_at - time.time())))
            message = words["error_key_rate"].format(limit=number(limit.amount), seconds=seconds)
            raise Problem(429, message, retry_after_seconds=seconds)
        if caller.tokens_per_day or caller.requests_per_day:
            await self._refuse_beyond_quota(request, caller)

    async def _refuse_beyond_quota(self, request: Request, caller: Caller) -> None:
        today = await self.used_today(caller.owner)
        for wording, used, limit in (
            (words["error_key_quota"], today.tokens, caller.tokens_per_day),
            (words["error_key_requests"], today.requests, caller.requests_per_day),
        ):
            if limit and used >= limit:
                await self.audit(caller.owner, "reached its quota", request)
                message = wording.format(used=number(used), limit=number(limit))
                raise Problem(429, message, retry_after_seconds=self._until_tomorrow())

    async def audit(self, owner: str, action: str, request: Request, *, by_operator: bool = False) -> None:
        """Record an action in the audit log. Failures are only logged."""
        # Operators' actions are always written, to a log that other users cannot fill. Repeated actions of an owner are
        # counted. Unauthenticated requests do not cause a write each.
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
            self._unwritten += self._counted(key)
            self._audited[key] = time.monotonic(), 0
            if owner == NOBODY.owner:
                self._unwritten.append(entry)
                return
        try:
            await self.store.add_audit(entry)
        except StorageError as error:
            _log.warning("the audit log cannot be written: %s", error)

    def _counted(self, key: tuple[str, str]) -> list[AuditEntry]:
        _, count = self._audited.pop(key, (0.0, 0))
        return [AuditEntry(int(1000 * self._clock()), *key, count=count)] if count else []

    async def _write_audit(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        over = [
            key
            for key, (began, _) in self._audited.items()
            if all_of_it or now - began >= SELDOM.get(key[1], AUDIT_SECONDS)
        ]
        entries = [*self._unwritten, *(each for key in over for each in self._counted(key))]
        self._unwritten = []
        if not entries:
            return
        try:
            await self.store.add_audit(*entries)
        except (StorageError, RuntimeError) as error:
            _log.warning("the audit log cannot be written: %s", error)

    def _until_tomorrow(self) -> int:
        now = datetime.fromtimestamp(self._clock(), UTC)
        midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), UTC)
        return math.ceil((midnight - now).total_seconds())


def _least(wanted: Wanted) -> int:
    # An answer has at least one token.
    return wanted.prompt_tokens + min(1, wanted.answer_tokens)


def _asks_the_model(request: Request) -> bool:
    if request.method != "POST":
        return False
    return is_api(request.scope) or request.scope["path"].rstrip("/").rpartition("/")[2] in ASKING
