"""Messages between replicas arrive, including after Valkey returns, and a follower misses none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from limits import RateLimitItemPerMinute
from scripted_engine import ScriptedEngine
from valkey_server import ValkeyServer
from web.store.database_proxy import database_proxy

from notso.web.replicas import valkey_exchange
from notso.web.replicas.exchange import Body, LocalExchange
from notso.web.replicas.joining import exchange_at
from notso.web.replicas.valkey_exchange import ValkeyCounters, ValkeyExchange
from notso.web.values.errors import SettingsError


class Lines:
    """A log of lines; each line is one change."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.finished = False
        self.at_change: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        return len(self.lines) + self.finished

    def add(self, *lines: str, last: bool = False) -> None:
        self.lines += lines
        self.finished = last
        if self.at_change is not None:
            self.at_change()

    def changes(self, after: int) -> Body:
        return {"lines": self.lines[max(0, after) :]}

    def take(self, changes: Body) -> bool:
        after = max(0, changes["after"])
        if after > len(self.lines):
            return False
        self.lines += changes["lines"][len(self.lines) - after :]
        self.finished = changes["finished"]
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def joined(*exchanges: ValkeyExchange) -> None:
    """Start the exchanges and wait until they read new messages."""
    for each in exchanges:
        each.start()
    await until(lambda: all(each._at is not None for each in exchanges))


def together(valkey: ValkeyServer, play: Callable[[ValkeyExchange, ValkeyExchange], Awaitable[None]]) -> None:
    async def run() -> None:
        here, there = ValkeyExchange(valkey.url), ValkeyExchange(valkey.url)
        await joined(here, there)
        try:
            await play(here, there)
        finally:
            await here.close()
            await there.close()

    asyncio.run(run())


def test_messages_reach_only_other_replicas_in_order(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        heard: list[int] = []
        own: list[Body] = []
        there.subscribe("number", lambda body: heard.append(body["value"]))
        here.subscribe("number", own.append)
        there.subscribe("crooked", lambda body: body["what is not there"])
        here.send("crooked")
        for number in range(300):
            here.send("number", value=number)
            if number % 50 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(heard) >= 300)
        assert heard == list(range(300)) and not own

    together(valkey, play)


def test_follower_receives_whole_log_at_any_time(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, early, late = Lines(), Lines(), Lines()
        with there.following("x", early.take):
            here.publish("x", log)
            for number in range(50):
                log.add(f"line {number} \u2028 ü")
                await asyncio.sleep(0.001)
            await until(lambda: len(early.lines) == 50)
            with there.following("x", late.take):
                await until(lambda: len(late.lines) == 50)
                log.add("the last", last=True)
                await until(lambda: early.finished and late.finished)
        assert early.lines == late.lines == log.lines
        assert not here._published, "a finished log is released after its end has been published"
        after_the_end = Lines()
        with there.following("x", after_the_end.take):
            await until(lambda: after_the_end.finished)
        assert after_the_end.lines == log.lines

    together(valkey, play)


def test_stored_log_length_is_bounded(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_exchange, "WHOLE_BYTES", 200)

    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, copy, longest = Lines(), Lines(), 0
        here.publish("x", log)
        with there.following("x", copy.take):
            for number in range(60):
                log.add(f"line {number}")
                await until(lambda: len(copy.lines) == len(log.lines))
                longest = max(longest, await here._client.xlen("notso:log:x"))
        assert copy.lines == log.lines and 2 < longest < 50
        assert 0 < await here._client.ttl("notso:log:x") <= valkey_exchange.KEEP_SECONDS

    together(valkey, play)


def test_valkey_outage_loses_no_lines_or_messages(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, copy, heard, gaps = Lines(), Lines(), list[Any](), list[bool]()
        there.subscribe("word", lambda body: heard.append(body["value"]))
        there.at_gap.append(lambda: gaps.append(True))
        here.publish("x", log)
        log.add("before")
        with there.following("x", copy.take):
            await until(lambda: copy.lines == log.lines)
            await asyncio.to_thread(valkey.stop)
            log.add("while it is away")
            here.send("word", value="stop")
            await until(lambda: here.is_unreachable and there.is_unreachable)
            assert await there.claim("c", "me") == "" and await there.get_value("v") is None
            assert await there.is_claimed("c"), "an unreachable claim counts as held"
            await asyncio.to_thread(valkey.start)  # Valkey restarts with an empty database.
            await until(lambda: copy.lines == log.lines and heard == ["stop"] and bool(gaps))
            log.add("after", last=True)
            await until(lambda: copy.finished)
        assert copy.lines == ["before", "while it is away", "after"]

    together(valkey, play)


def test_messages_sent_during_a_flush_of_a_full_queue_are_kept(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_exchange, "MAX_MESSAGES", 5)

    async def play() -> list[Body]:
        exchange = ValkeyExchange(valkey.url)
        for value in range(5):
            exchange.send("word", value=value)
        flush = asyncio.create_task(exchange._flush())
        await asyncio.sleep(0)  # the first five are being sent
        for value in range(5, 8):
            exchange.send("word", value=value)
        await flush
        await exchange._flush()
        entries = await exchange._client.xrange(exchange._bus)
        await exchange.close()
        return list(valkey_exchange._bodies(entries))

    assert [body["value"] for body in asyncio.run(play())] == list(range(8))


def test_change_of_a_log_after_its_end_does_not_stop_the_exchange(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, heard = Lines(), list[Body]()
        there.subscribe("word", heard.append)
        here.publish("x", log)
        log.add("all", last=True)
        await until(lambda: not here._published)
        log.add("more", last=True)
        await here._flush()
        here.send("word")
        await until(lambda: bool(heard))

    together(valkey, play)


def test_log_is_published_again_after_flush(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, copy = Lines(), Lines()
        here.publish("x", log)
        log.add("one")
        with there.following("x", copy.take):
            await until(lambda: copy.lines == log.lines)
            await here._client.flushall()
            log.add("two", last=True)
            await until(lambda: copy.finished)
        late = Lines()
        with there.following("x", late.take):
            await until(lambda: late.finished)
        assert late.lines == copy.lines == ["one", "two"]

    together(valkey, play)


def test_claim_survives_restart_of_valkey(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        assert await here.claim("c", "first") == ""
        valkey.stop()
        await until(lambda: here.is_unreachable and there.is_unreachable)
        valkey.start()
        found = 0
        async with asyncio.timeout(60):
            while not found:
                with contextlib.suppress(*valkey_exchange.FAILURES):  # the pool may have connections from before
                    found = await here._client.exists("notso:claim:c")
        assert await there.is_claimed("c") and await there.claim("c", "second") == "first"
        here.release("c")
        async with asyncio.timeout(60):
            while await there.is_claimed("c"):
                await asyncio.sleep(0.01)

    together(valkey, play)


def test_claims_are_renewed_while_others_are_deleted(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        assert await here.claim("a", "first") == await here.claim("b", "second") == ""
        deleting, go = asyncio.Event(), asyncio.Event()

        async def delete(*_: str) -> None:
            deleting.set()
            await go.wait()

        with monkeypatch.context() as patch:
            patch.setattr(here._client, "delete", delete)
            here.release("a")
            await deleting.wait()
            await there._client.delete("notso:claim:b")
            async with asyncio.timeout(60):
                while not await there.is_claimed("b"):
                    await asyncio.sleep(0.01)
            go.set()

    together(valkey, play)


def test_claim_is_exclusive_until_released_or_holder_closes(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        assert await here.claim("c", "first") == ""
        assert await there.claim("c", "second") == "first"
        assert await there.is_claimed("c")
        assert 0 < await here._client.ttl("notso:claim:c") <= valkey_exchange.CLAIM_SECONDS
        here.release("c")
        async with asyncio.timeout(60):
            while await there.is_claimed("c"):
                await asyncio.sleep(0.002)
        assert await there.claim("c", "second") == ""
        await there.close()
        assert not await here.is_claimed("c")

    together(valkey, play)


def test_values_are_shared_by_replicas(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        assert await there.get_value("v") is None
        await here.set_value("v", "1.5", 100)
        assert await there.get_value("v") == "1.5"

    together(valkey, play)


def test_values_set_during_an_outage_are_stored_before_the_messages(valkey: ValkeyServer) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        log, copy, heard = Lines(), Lines(), list[Any]()
        there.subscribe("word", lambda body: heard.append(body["value"]))
        here.publish("x", log)
        await here.set_value("v", "old", 100)
        await asyncio.to_thread(valkey.stop)
        await here.set_value("v", "older", 100)
        await here.set_value("v", "new", 100)
        log.add("one", last=True)
        here.send("word", value="said")
        assert await here.get_value("v") == "new" and await there.get_value("v") is None
        assert await there.get_value("v", "unknown") == "unknown"
        await until(lambda: there.is_unreachable)
        await asyncio.to_thread(valkey.start)
        await until(lambda: heard == ["said"])
        async with asyncio.timeout(60):
            while await there.get_value("v") != "new":  # the pool may have connections from before
                await asyncio.sleep(0)
        assert 0 < await there._client.ttl("notso:value:v") <= 100
        with there.following("x", copy.take):
            await until(lambda: copy.finished)
        await until(lambda: not here._published and not here._unsaved)

    together(valkey, play)


def test_number_of_values_that_wait_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_exchange, "MAX_MESSAGES", 2)

    async def run() -> None:
        exchange = ValkeyExchange("unix:///nowhere/valkey.sock")
        for name in "abc":
            await exchange.set_value(name, name, 60)
        assert [await exchange.get_value(name) for name in "abc"] == [None, "b", "c"]
        await exchange.close()

    asyncio.run(run())


def test_claim_that_ends_while_it_is_read_is_stored_for_the_next_holder(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        assert await there.claim("c", "first") == ""
        get = here._client.get

        async def get_after_the_end(key: str) -> Any:
            await there._client.delete(key)
            return await get(key)

        with monkeypatch.context() as patch:
            patch.setattr(here._client, "get", get_after_the_end)
            assert await here.claim("c", "second") == ""
        assert await there._client.get("notso:claim:c") == b"second"

    together(valkey, play)


def test_idle_replica_notices_that_valkey_is_reachable_after_a_claim_failed(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(here: ValkeyExchange, there: ValkeyExchange) -> None:
        async def time_out(*_: Any, **__: Any) -> None:
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(here._client, "set", time_out)
            assert await here.claim("c", "me") == "" and here.is_unreachable
        await until(lambda: not here.is_unreachable)

    together(valkey, play)


def test_value_is_queued_without_waiting_for_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        exchange = ValkeyExchange("unix:///nowhere/valkey.sock")
        exchange.is_unreachable = True
        monkeypatch.setattr(exchange._client, "set", lambda *_, **__: pytest.fail("the value was sent to the server"))
        await exchange.set_value("v", "1", 60)
        assert await exchange.get_value("v") == "1" and exchange._work.is_set()
        await exchange.close()

    asyncio.run(run())


def test_newest_value_is_kept_when_earlier_calls_fail_late_or_are_canceled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        exchange, is_away = ValkeyExchange("unix:///nowhere/valkey.sock"), asyncio.Event()

        async def set_value(key: str, value: str, ex: int) -> None:
            if value != "new":
                await is_away.wait()
                raise OSError

        monkeypatch.setattr(exchange._client, "set", set_value)
        slow = asyncio.create_task(exchange.set_value("v", "old", 60))
        await asyncio.sleep(0)
        await exchange.set_value("v", "new", 60)
        is_away.set()
        await slow
        assert not exchange._unsaved and not exchange._work.is_set()
        is_away.clear()
        slow = asyncio.create_task(exchange.set_value("v", "newer", 60))
        await asyncio.sleep(0)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert await exchange.get_value("v") == "newer" and exchange._work.is_set()
        await exchange.close()

    asyncio.run(run())


def test_invalid_valkey_url_is_rejected() -> None:
    assert isinstance(exchange_at(None), LocalExchange)
    with pytest.raises(SettingsError, match="valkey_url is not a server URL"):
        exchange_at("valkey://127.0.0.1:port")


def test_close_repeats_lost_cancellation(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, reading = [], []

    async def read() -> None:
        reading.append(True)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            lost.append(True)
            if len(lost) > 1:
                raise

    async def run() -> None:
        exchange = ValkeyExchange(valkey.url)
        monkeypatch.setattr(exchange, "_read", read)
        exchange.start()
        await until(lambda: bool(reading))
        async with asyncio.timeout(60):
            await exchange.close()
        assert len(lost) == 2

    asyncio.run(run())


def test_silent_valkey_blocks_no_replica(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valkey accepts connections and never answers: replicas continue on their own, and closing does not wait for
    it."""
    monkeypatch.setattr(valkey_exchange, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(valkey_exchange, "COUNTER_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(valkey_exchange, "BLOCK_SECONDS", 0.1)

    async def play() -> None:
        here, counters = ValkeyExchange(proxy.url), ValkeyCounters(proxy.url)
        here.start()
        while await here.get_value("v") != "1":
            await here.set_value("v", "1", 60)
        proxy.silent = True
        await until(lambda: here.is_unreachable)
        assert await here.claim("c", "me") == "" and await here.get_value("v") is None and await here.is_claimed("c")
        assert await counters.hit(RateLimitItemPerMinute(1), "requests", "10.0.0.1")
        assert not await counters.hit(RateLimitItemPerMinute(1), "requests", "10.0.0.1"), "this replica counts alone"
        proxy.silent = False
        await until(lambda: not here.is_unreachable)
        while await here.get_value("v") != "1":
            pass
        proxy.silent = True
        await here.close()

    with database_proxy(valkey.url) as proxy:
        asyncio.run(play())


def test_health_reports_missing_valkey(replica: Callable[..., Any], valkey: ValkeyServer) -> None:
    server = replica(ScriptedEngine())
    assert "missing" not in server.client.get("/health").json()
    valkey.stop()
    server.wait(lambda: server.client.get("/health").json().get("missing") == ["valkey"])
    assert server.client.get("/health").status_code == 200
    valkey.start()
    server.wait(lambda: "missing" not in server.client.get("/health").json())
