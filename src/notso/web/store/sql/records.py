"""Implement ApiRecords in SQL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from notso.web.store.records import (
    KEPT_SECONDS,
    LEASE_SECONDS,
    MAX_FILE_BYTES_OF_OWNER,
    MAX_FILES,
    MAX_KEPT_ANSWERS,
    MAX_KEPT_BYTES_OF_OWNER,
    PART_BYTES,
    IdempotentResponse,
    StoredBatch,
    StoredFile,
    UnfinishedResponse,
)
from notso.web.store.sql.database import Database, Transactions, columns_of, placeholders
from notso.web.values.durations import current_ms
from notso.web.values.errors import StorageFullError

_FILE = columns_of(StoredFile)
_ADD_FILE = f"INSERT INTO api_files (owner, {_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)"
_ADD_PART = "INSERT INTO api_file_parts (file_id, part, content) VALUES (?, ?, ?)"
_OPEN = columns_of(UnfinishedResponse)
_BATCH = columns_of(StoredBatch)
# Deletes an owner's oldest idempotent responses until the rest are within the maximum number and total size. A
# response that alone exceeds the maximum size is also deleted.
_FORGET_ANSWERS = """
DELETE FROM kept_answers WHERE owner = ? AND idempotency_key IN (
    SELECT idempotency_key FROM (
        SELECT idempotency_key,
            row_number() OVER newest AS number, sum(length(body)) OVER newest AS size
        FROM kept_answers WHERE owner = ?
        WINDOW newest AS (ORDER BY created_ms DESC, idempotency_key)
    ) AS counted WHERE number > ? OR size > ?
)
"""


def _lease_expiry(now_ms: int) -> int:
    return now_ms + int(1000 * LEASE_SECONDS)


def _to_unfinished_response(db: Database, row: Any) -> UnfinishedResponse | None:
    # Tokens are stored in parts, in `response_tokens`. An older release stored them in `progress`; these come first.
    if row is None:
        return None
    response = UnfinishedResponse(**row)
    sql = "SELECT told FROM response_tokens WHERE response_id = ? ORDER BY first"
    rows = db.execute(sql, (response.id,)).fetchall()
    if not rows:
        return response
    parts = [json.loads(each) for each in (response.progress, *(row["told"] for row in rows)) if each]
    joined = {name: [each for part in parts for each in part.get(name, ())] for name in ("ids", "closed_at")}
    return replace(response, progress=json.dumps(parts[-1] | joined))


class SQLRecords:
    def __init__(self, store: Transactions) -> None:
        self._store = store

    async def add_file(self, owner: str, file: StoredFile, content: bytes) -> None:
        def work(db: Database) -> None:
            stored = db.execute(
                "SELECT count(*) AS n, coalesce(sum(size), 0) AS bytes FROM api_files WHERE owner = ?", (owner,)
            ).fetchone()
            if stored["n"] >= MAX_FILES or stored["bytes"] + file.size > MAX_FILE_BYTES_OF_OWNER:
                raise StorageFullError(
                    f"the limit per user is {MAX_FILES:,} files with {MAX_FILE_BYTES_OF_OWNER:,} bytes in total;"
                    " delete some"
                )
            db.execute(_ADD_FILE, (owner, *astuple(file)))
            for part, start in enumerate(range(0, len(content), PART_BYTES)):
                db.execute(_ADD_PART, (file.id, part, content[start : start + PART_BYTES]))

        await self._store.write(work, owner)

    async def files(self, owner: str) -> list[StoredFile]:
        sql = f"SELECT {_FILE} FROM api_files WHERE owner = ? ORDER BY created_ms DESC, id DESC"
        return await self._store.run_read(lambda db: [StoredFile(**row) for row in db.execute(sql, (owner,))], owner)

    async def file(self, owner: str, file_id: str) -> StoredFile | None:
        sql = f"SELECT {_FILE} FROM api_files WHERE id = ? AND owner = ?"
        rows = await self._store.read(owner, sql, file_id, owner)
        return StoredFile(**rows[0]) if rows else None

    async def content(self, owner: str, file_id: str) -> AsyncIterator[bytes]:
        sql = (
            "SELECT part, content FROM api_file_parts WHERE file_id = ? AND part > ?"
            " AND file_id IN (SELECT id FROM api_files WHERE owner = ?) ORDER BY part LIMIT 1"
        )
        part = -1
        while rows := await self._store.read(owner, sql, file_id, part, owner):
            part = rows[0]["part"]
            yield bytes(rows[0]["content"])

    async def delete_file(self, owner: str, file_id: str) -> bool:
        def work(db: Database) -> bool:
            if not db.execute("DELETE FROM api_files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount:
                return False
            db.execute("DELETE FROM api_file_parts WHERE file_id = ?", (file_id,))
            return True

        return await self._store.write(work, owner)

    async def add_batch(self, batch: StoredBatch) -> None:
        sql = f"INSERT INTO api_batches ({_BATCH}, holder, held_until_ms) VALUES (?, ?, ?, ?, ?, ?, '', 0)"
        texts = json.dumps(batch.body, ensure_ascii=False), json.dumps(batch.plan, ensure_ascii=False)
        values = (batch.id, batch.owner, batch.created_ms, *texts, batch.is_open)
        await self._store.change(batch.owner, sql, *values)

    async def batches(self, owner: str) -> list[StoredBatch]:
        sql = f"SELECT {_BATCH} FROM api_batches WHERE owner = ? ORDER BY created_ms DESC, id DESC"
        return await self._store.run_read(lambda db: [_batch(row) for row in db.execute(sql, (owner,))], owner)

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        sql = f"SELECT {_BATCH} FROM api_batches WHERE id = ? AND owner = ?"
        rows = await self._store.read(owner, sql, batch_id, owner)
        return _batch(rows[0]) if rows else None

    async def claim_batch(self, holder: str, busy: Sequence[str], now_ms: int) -> StoredBatch | None:
        others = f" AND owner NOT IN ({placeholders(busy)})" if busy else ""
        find = (
            f"SELECT {_BATCH} FROM api_batches WHERE is_open AND held_until_ms < ?{others}"
            " ORDER BY created_ms, id LIMIT 1"
        )

        def work(db: Database) -> StoredBatch | None:
            row = db.execute(find + db.for_update, (now_ms, *busy)).fetchone()
            if row is None:
                return None
            db.execute(_LEASE, (holder, _lease_expiry(now_ms), row["id"]))
            return _batch(row)

        return await self._store.write(work)

    async def renew_batch(self, batch_id: str, holder: str, now_ms: int) -> StoredBatch | None:
        def work(db: Database) -> StoredBatch | None:
            row = _leased_batch(db, batch_id, holder)
            if row is not None:
                db.execute(_LEASE, (holder, _lease_expiry(now_ms), batch_id))
            return _batch(row) if row is not None else None

        return await self._store.write(work)

    async def change_batch(
        self, owner: str, batch_id: str, body: Mapping[str, Any], *, before: str, is_open: bool = True
    ) -> bool:
        def work(db: Database) -> bool:
            row = db.execute(
                f"SELECT body FROM api_batches WHERE id = ? AND owner = ?{db.for_update}", (batch_id, owner)
            ).fetchone()
            if row is None or json.loads(row["body"])["status"] != before:
                return False
            sql = "UPDATE api_batches SET body = ?, is_open = ? WHERE id = ?"
            db.execute(sql, (json.dumps(body, ensure_ascii=False), is_open, batch_id))
            return True

        return await self._store.write(work, owner)

    async def add_line(self, batch_id: str, holder: str, file_id: str, number: int, content: bytes) -> bool:
        def work(db: Database) -> bool:
            if _leased_batch(db, batch_id, holder) is None:
                return False
            db.execute(_ADD_PART + " ON CONFLICT DO NOTHING", (file_id, number, content))
            return True

        return await self._store.write(work)

    async def lines(self, *file_ids: str) -> set[int]:
        sql = f"SELECT part FROM api_file_parts WHERE file_id IN ({placeholders(file_ids)})"
        return await self._store.run_read(lambda db: {row["part"] for row in db.execute(sql, file_ids)})

    async def finish_file(self, owner: str, file: StoredFile) -> StoredFile | None:
        def work(db: Database) -> StoredFile | None:
            sql = (
                "SELECT count(*) AS n, coalesce(sum(length(content)), 0) AS bytes FROM api_file_parts WHERE file_id = ?"
            )
            written = db.execute(sql, (file.id,)).fetchone()
            if not written["n"]:
                return None
            finished = replace(file, size=int(written["bytes"]))
            db.execute("DELETE FROM api_files WHERE id = ?", (file.id,))  # the file may already exist after a crash
            db.execute(_ADD_FILE, (owner, *astuple(finished)))
            return finished

        return await self._store.write(work, owner)

    async def add_unfinished_response(self, response: UnfinishedResponse, holder: str) -> None:
        values = (*astuple(response), holder, _lease_expiry(response.created_ms))
        sql = f"INSERT INTO open_responses ({_OPEN}, holder, held_until_ms) VALUES ({placeholders(values)})"
        await self._store.write(lambda db: db.execute(sql, values), response.owner)

    async def unfinished_response(self, owner: str, response_id: str) -> UnfinishedResponse | None:
        sql = f"SELECT {_OPEN} FROM open_responses WHERE id = ? AND owner = ?"
        return await self._store.run_read(
            lambda db: _to_unfinished_response(db, db.execute(sql, (response_id, owner)).fetchone()), owner
        )

    async def unfinished_stream(self, owner: str, conversation: str) -> UnfinishedResponse | None:
        where = "owner = ? AND conversation = ? AND conversation <> ''"
        sql = f"SELECT {_OPEN} FROM open_responses WHERE {where} ORDER BY created_ms DESC, id LIMIT 1"
        return await self._store.run_read(
            lambda db: _to_unfinished_response(db, db.execute(sql, (owner, conversation)).fetchone()), owner
        )

    async def save_progress(
        self, response_id: str, holder: str, first: int, progress: str, *, is_further: bool
    ) -> None:
        leased = "SELECT 1 AS yes FROM open_responses WHERE id = ? AND holder = ?"

        def work(db: Database) -> None:
            if db.execute(leased + db.for_update, (response_id, holder)).fetchone() is None:
                return
            db.execute("DELETE FROM response_tokens WHERE response_id = ? AND first >= ?", (response_id, first))
            if not first:  # also clear the tokens that an older release stored in `progress`
                db.execute("UPDATE open_responses SET progress = '' WHERE id = ? AND progress <> ''", (response_id,))
            db.execute("INSERT INTO response_tokens VALUES (?, ?, ?)", (response_id, first, progress))
            if is_further:
                db.execute("UPDATE open_responses SET tries = 0 WHERE id = ? AND tries > 0", (response_id,))

        await self._store.write(work)

    async def renew_unfinished_responses(self, holder: str, now_ms: int) -> None:
        sql = "UPDATE open_responses SET held_until_ms = ? WHERE holder = ?"
        await self._store.write(lambda db: db.execute(sql, (_lease_expiry(now_ms), holder)))

    async def claim_unfinished_response(
        self, holder: str, known: Sequence[str], now_ms: int
    ) -> UnfinishedResponse | None:
        unleased = "holder <> ? AND held_until_ms < ?"
        leased = "holder = ?" + (f" AND id NOT IN ({placeholders(known)})" if known else "")
        where = f"{unleased} OR {leased}"
        sql = f"SELECT {_OPEN}, holder FROM open_responses WHERE {where} ORDER BY created_ms, id LIMIT 1"
        lease = "UPDATE open_responses SET holder = ?, held_until_ms = ?, tries = ? WHERE id = ?"

        def work(db: Database) -> UnfinishedResponse | None:
            row = db.execute(sql + db.for_update, (holder, now_ms, holder, *known)).fetchone()
            if row is None:
                return None
            values = dict(row)
            values["tries"] += values.pop("holder") != holder
            db.execute(lease, (holder, _lease_expiry(current_ms()), values["tries"], values["id"]))
            return _to_unfinished_response(db, values)

        return await self._store.write(work)

    async def release_unfinished_responses(self, holder: str) -> None:
        sql = "UPDATE open_responses SET holder = '', held_until_ms = 0, tries = 0 WHERE holder = ?"
        await self._store.write(lambda db: db.execute(sql, (holder,)))

    async def delete_unfinished_response(self, owner: str, response_id: str) -> None:
        sql = "DELETE FROM open_responses WHERE id = ? AND owner = ?"
        await self._store.write(lambda db: db.execute(sql, (response_id, owner)), owner)

    async def save_idempotent_response(self, owner: str, key: str, answer: IdempotentResponse) -> None:
        sql = (
            "INSERT INTO kept_answers (owner, idempotency_key, digest, status, headers, body, created_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        headers = json.dumps(answer.headers)
        values = (owner, key, answer.digest, answer.status, headers, answer.body, answer.created_ms)

        def work(db: Database) -> None:
            db.execute("DELETE FROM kept_answers WHERE owner = ? AND idempotency_key = ?", (owner, key))
            db.execute(sql, values)
            db.execute(_FORGET_ANSWERS, (owner, owner, MAX_KEPT_ANSWERS, MAX_KEPT_BYTES_OF_OWNER))

        await self._store.write(work, owner)

    async def idempotent_response(self, owner: str, key: str, now_ms: int) -> IdempotentResponse | None:
        sql = (
            "SELECT digest, status, headers, body, created_ms FROM kept_answers"
            " WHERE owner = ? AND idempotency_key = ? AND created_ms > ?"
        )
        rows = await self._store.read(owner, sql, owner, key, now_ms - int(1000 * KEPT_SECONDS))
        if not rows:
            return None
        row = rows[0]
        headers = tuple((name, value) for name, value in json.loads(row["headers"]))
        return IdempotentResponse(bytes(row["digest"]), row["status"], headers, bytes(row["body"]), row["created_ms"])

    async def purge(self, now_ms: int) -> None:
        def work(db: Database) -> None:
            db.execute("DELETE FROM kept_answers WHERE created_ms <= ?", (now_ms - int(1000 * KEPT_SECONDS),))
            expired = "SELECT id FROM api_files WHERE expires_ms > 0 AND expires_ms <= ? LIMIT 1"
            if (row := db.execute(expired, (now_ms,)).fetchone()) is not None:  # one per call, as files may be large
                db.execute("DELETE FROM api_files WHERE id = ?", (row["id"],))
                db.execute("DELETE FROM api_file_parts WHERE file_id = ?", (row["id"],))

        await self._store.write(work)


_LEASE = "UPDATE api_batches SET holder = ?, held_until_ms = ? WHERE id = ?"


def _leased_batch(db: Database, batch_id: str, holder: str) -> Any:
    sql = f"SELECT {_BATCH} FROM api_batches WHERE id = ? AND holder = ? AND is_open{db.for_update}"
    return db.execute(sql, (batch_id, holder)).fetchone()


def _batch(row: Any) -> StoredBatch:
    body, plan = json.loads(row["body"]), json.loads(row["plan"])
    return StoredBatch(row["id"], row["owner"], row["created_ms"], body, plan, bool(row["is_open"]))
