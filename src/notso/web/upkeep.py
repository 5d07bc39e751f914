"""What a server does now and then, as long as it runs: deleting for good what was deleted, and giving memory back."""

from __future__ import annotations

import asyncio
import contextlib
import time

from notso.smollm3 import give_back_freed
from notso.web.services import Shared
from notso.web.store.protocol import Conversation
from notso.web.turns.turns import Turns
from notso.web.values.errors import NotsoError

TEMPORARY_SECONDS = 3600.0  # after its last use
UNDO_SECONDS = 15.0  # the page offers it for 10
PURGE_SECONDS = 10.0
GIVE_BACK_SECONDS = 60.0


async def purge(shared: Shared, turns: Turns) -> None:
    """What was deleted is gone for good once it is too late to undo that, from the engine's caches first: if that fails
    it is tried again."""
    store, host = shared.store, shared.engine
    unforgotten: dict[Conversation, None] = {}  # while no engine is there
    while True:
        with contextlib.suppress(NotsoError):
            now = time.monotonic()
            await _throw_away_lapsed(shared, turns)
            unforgotten.update(dict.fromkeys(await store.thrown_away(UNDO_SECONDS, now)))
            if unforgotten and not host.loaded():
                host.want(host.default)
            for each in list(unforgotten) if host.loaded() else ():
                await host.clear_cache(each.owner, each.first_message_id)
                del unforgotten[each]
            await store.purge(UNDO_SECONDS, now)
        await asyncio.sleep(PURGE_SECONDS)


async def _throw_away_lapsed(shared: Shared, turns: Turns) -> None:
    before_ms = time.time_ns() // 1_000_000 - int(TEMPORARY_SECONDS * 1000)
    for owner, chat_id in await shared.store.lapsed(before_ms):
        turns.stop_chat(owner, chat_id)
        await shared.store.trash_chat(owner, chat_id)


async def give_back() -> None:
    """What one request took for a moment stays with the C library, of which every thread has its own part: each grows
    to the most that it ever held, and nothing of it would come back. Returning it takes a millisecond."""
    while True:
        await asyncio.sleep(GIVE_BACK_SECONDS)
        await asyncio.to_thread(give_back_freed)
