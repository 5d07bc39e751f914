"""Files, batches and answers by idempotency key, in both databases."""

from __future__ import annotations

import json
from typing import Any

from web.store.conftest import Kept

from notso.web.store.records import (
    LEASE_SECONDS,
    PART_BYTES,
    IdempotentResponse,
    StoredBatch,
    StoredFile,
    UnfinishedResponse,
)

LEASE_MS = int(1000 * LEASE_SECONDS)
FILE = StoredFile("file-1", "a\u2028.jsonl", "batch", 2 * PART_BYTES + 1, 1000)
CONTENT = bytes(range(256)) * (2 * PART_BYTES // 256) + b"\x00"
ANSWER = IdempotentResponse(b"\x00\xff" * 16, 200, (("content-type", "text/plain"),), b"\x00body\xff", 5000)


def batch(id: str, owner: str = "a", created_ms: int = 0, status: str = "in_progress") -> StoredBatch:
    return StoredBatch(id, owner, created_ms, {"status": status, "text": "\x00"}, {"x": [1, None]})


async def read(records: Any, owner: str, file_id: str) -> list[bytes]:
    return [part async for part in records.content(owner, file_id)]


def test_files_are_accessible_only_to_their_owner(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records = store.records
        await records.add_file("a", FILE, CONTENT)
        assert await records.file("a", "file-1") == FILE and await records.files("a") == [FILE]
        assert await records.file("b", "file-1") is None and await records.files("b") == []
        parts = await read(records, "a", "file-1")
        assert [len(part) for part in parts] == [PART_BYTES, PART_BYTES, 1] and b"".join(parts) == CONTENT
        assert await read(records, "b", "file-1") == [] and not await records.delete_file("b", "file-1")
        assert await records.delete_file("a", "file-1") and not await records.delete_file("a", "file-1")
        assert await read(records, "a", "file-1") == [] and await records.lines("file-1") == set()

    kept.run(work)


def test_batch_is_claimed_by_one_holder_until_lease_expires(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records = store.records
        for each in (batch("b1", created_ms=1), batch("b2", created_ms=2), batch("b3", "b", 3)):
            await records.add_batch(each)
        assert await records.batch("b", "b1") is None and await records.batch("a", "b1") == batch("b1", created_ms=1)
        assert [each.id for each in await records.batches("a")] == ["b2", "b1"]
        first = await records.claim_batch("one", (), 1000)
        assert first.id == "b1"
        assert (await records.claim_batch("one", ("a",), 1000)).id == "b3"
        assert (await records.claim_batch("two", (), 1000)).id == "b2"
        assert await records.claim_batch("two", (), 1000 + LEASE_MS) is None
        assert (await records.renew_batch("b1", "one", 1000 + LEASE_MS)).id == "b1"
        assert (await records.claim_batch("two", ("b",), 1001 + LEASE_MS)).id == "b2"
        assert (await records.claim_batch("two", (), 1001 + LEASE_MS)).id == "b3"
        assert await records.renew_batch("b3", "one", 0) is None
        assert not await records.add_line("b3", "one", "file-3", 0, b"late")
        assert await records.add_line("b3", "two", "file-3", 0, b"in time")

    kept.run(work)


def test_batch_lines_become_a_file(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records = store.records
        await records.add_batch(batch("b1"))
        await records.claim_batch("one", (), 1000)
        for number in (2, 0, 2):
            assert await records.add_line("b1", "one", "file-1", number, b"line %d\n" % number)
        assert await records.lines("file-1", "file-2") == {0, 2}
        assert await records.file("a", "file-1") is None and await read(records, "a", "file-1") == []
        for _ in range(2):  # a crash may repeat the call
            finished = await records.finish_file("a", FILE)
            assert finished.size == 14 and await records.files("a") == [finished]
        assert await read(records, "a", "file-1") == [b"line 0\n", b"line 2\n"]
        assert await records.finish_file("a", StoredFile("file-2", "x", "batch", 0, 0)) is None

    kept.run(work)


def test_batch_changes_only_from_the_expected_status(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records = store.records
        await records.add_batch(batch("b1"))
        cancelling = {"status": "cancelling"}
        assert not await records.change_batch("b", "b1", cancelling, before="in_progress")
        assert not await records.change_batch("a", "b1", cancelling, before="validating")
        assert await records.change_batch("a", "b1", cancelling, before="in_progress")
        assert (await records.batch("a", "b1")).body == cancelling
        assert await records.change_batch("a", "b1", {"status": "cancelled"}, before="cancelling", is_open=False)
        assert not (await records.batch("a", "b1")).is_open
        assert await records.claim_batch("one", (), 1000) is None

    kept.run(work)


def test_idempotent_answers_and_files_expire(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records, day = store.records, 86_400_000
        await records.save_idempotent_response("a", "key \u2028", ANSWER)
        assert await records.idempotent_response("a", "key \u2028", 5000 + day - 1) == ANSWER
        assert await records.idempotent_response("a", "key \u2028", 5000 + day) is None
        assert await records.idempotent_response("b", "key \u2028", 5000) is None
        await records.add_file("a", StoredFile("file-1", "x", "batch", 1, 0, expires_ms=5000), b"x")
        await records.purge(4999)
        assert await records.idempotent_response("a", "key \u2028", 0) == ANSWER and await records.files("a")
        await records.purge(5000 + day)
        assert await records.idempotent_response("a", "key \u2028", 0) is None and not await records.files("a")

    kept.run(work)


def test_response_tokens_are_stored_incrementally(kept: Kept) -> None:
    def tokens(*ids: int, closed_at: tuple[int, ...] = ()) -> str:
        return json.dumps({"ids": ids, "closed_at": closed_at, "origin": "o"})

    async def work(store: Any) -> None:
        records = store.records
        await records.add_unfinished_response(UnfinishedResponse("r", "a", "{}", "[]", 7, 1, conversation="c"), "one")
        for first, told in ((0, tokens()), (0, tokens(1, 2)), (2, tokens(3, closed_at=(2,))), (3, tokens(4))):
            await records.save_progress("r", "one", first, told, is_further=False)
        await records.save_progress("r", "two", 0, tokens(9), is_further=False)
        for found in (await records.unfinished_response("a", "r"), await records.unfinished_stream("a", "c")):
            assert json.loads(found.progress) == {"ids": [1, 2, 3, 4], "closed_at": [2], "origin": "o"}
        stored = await store.read("", "SELECT told FROM response_tokens ORDER BY first")
        assert [json.loads(row["told"])["ids"] for row in stored] == [[1, 2], [3], [4]]
        left = await records.claim_unfinished_response("two", (), 2 + LEASE_MS)
        assert left.tries == 1 and json.loads(left.progress)["ids"] == [1, 2, 3, 4]
        await records.save_progress("r", "two", 4, tokens(5), is_further=True)
        assert (await records.unfinished_response("a", "r")).tries == 0
        # a process with another model starts over
        await records.save_progress("r", "two", 0, tokens(6), is_further=False)
        assert json.loads((await records.unfinished_response("a", "r")).progress)["ids"] == [6]
        await records.delete_unfinished_response("a", "r")
        assert await store.read("", "SELECT told FROM response_tokens") == []

    kept.run(work)


def test_repeated_claim_returns_the_same_response(kept: Kept) -> None:
    async def work(store: Any) -> None:
        records = store.records
        await records.add_unfinished_response(UnfinishedResponse("r", "a", "{}", "[]", 7, 1), "one")
        assert await records.claim_unfinished_response("one", ("r",), 1) is None
        for _ in range(2):
            assert (await records.claim_unfinished_response("two", (), 2 + LEASE_MS)).tries == 1
        assert await records.claim_unfinished_response("two", ("r", "s"), 2 + LEASE_MS) is None
        await records.release_unfinished_responses("two")
        assert (await records.claim_unfinished_response("three", (), 2)).tries == 1, (
            "a shutdown is not a failed attempt"
        )

    kept.run(work)
