"""Load parts of a chat with recursive queries: the end of the shown branch, or the messages for a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from typing import Any

from notso.web.store.protocol import MOST_SHOWN, ShownMessage, StoredMessage
from notso.web.store.sql.database import Database, Rows, placeholders
from notso.web.store.sql.rows import message_from_row
from notso.web.store.tree import count_shown

_ROOT = "chat_id = ? AND owner = ? AND parent_id IS NULL AND trash_id IS NULL"
_UP = """
up(id, parent_id, role, k) AS (
    SELECT id, parent_id, role, 0 FROM messages WHERE id = ({last})
    UNION ALL
    SELECT m.id, m.parent_id, m.role, up.k + 1 FROM up JOIN messages m ON m.id = up.parent_id WHERE up.k < ?
)
"""
_CHOSEN = "(SELECT chosen_root FROM chats WHERE id = ? AND owner = ?)"
_MESSAGE = "SELECT id FROM messages WHERE id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL"
# Each message of a branch is followed by its chosen child, or by its newest child if none is chosen.
_DOWN = f"""
WITH RECURSIVE down(id, chosen_child, n) AS (
    SELECT id, chosen_child, 0 FROM messages WHERE id = coalesce(
        ({_MESSAGE}),
        (SELECT id FROM messages WHERE id = {_CHOSEN} AND {_ROOT}),
        (SELECT id FROM messages WHERE {_ROOT} ORDER BY position DESC LIMIT 1)
    )
    UNION ALL
    SELECT m.id, m.chosen_child, down.n + 1 FROM down JOIN messages m
    ON m.parent_id = down.id AND m.position = coalesce(
        (SELECT c.position FROM messages c WHERE c.id = down.chosen_child AND c.parent_id = down.id
            AND c.trash_id IS NULL),
        (SELECT max(c.position) FROM messages c WHERE c.parent_id = down.id AND c.trash_id IS NULL)
    )
)
"""
_LAST = "SELECT id FROM down ORDER BY n DESC LIMIT 1"
# To reach the column `size`, SQLite must read the text of the message, which may be long. Therefore, sizes are read
# only for messages that will probably be shown.
_FOUND = "id, parent_id, role, CASE WHEN k <= ? THEN (SELECT m.size FROM messages m WHERE m.id = up.id) END AS size"
_END = f"""
{_DOWN}, {_UP.format(last=_LAST)}
SELECT {_FOUND}, (SELECT max(n) FROM down) AS below FROM up ORDER BY k
"""
_ABOVE = f"WITH RECURSIVE {_UP.format(last=_MESSAGE)} SELECT {_FOUND}, 0 AS below FROM up ORDER BY k"
_DEPTH = f"WITH RECURSIVE {_UP.format(last=_MESSAGE)} SELECT max(k) AS depth FROM up"
_NO_END = 1 << 31
# Approximate lower bound on a message's length in a prompt. The length of attachments is divided by six, because they
# are stored as JSON, in which one character may become six (`\u00e9`). Prompts omit a question if its answer failed and
# is empty, so `_PART` does not count such questions.
_TEXT = "length(m.content) + length(m.attachments) / 6"
_IS_SUMMARY = "m.kind = 'summary' AND m.state = 'done' AND m.content <> ''"
_FAILED = "m.role = 'assistant' AND m.state = 'failed' AND m.content = ''"
_PART = f"""
part(id, parent_id, k, size, failed, is_summary) AS (
    SELECT m.id, m.parent_id, 0, {_TEXT}, {_FAILED}, {_IS_SUMMARY} FROM messages m WHERE m.id = ({{last}})
    UNION ALL
    SELECT m.id, m.parent_id, part.k + 1, part.size + CASE WHEN part.failed THEN 0 ELSE {_TEXT} END,
        {_FAILED}, {_IS_SUMMARY}
    FROM part JOIN messages m ON m.id = part.parent_id
    WHERE part.k < ? AND part.size <= ? AND NOT (part.is_summary AND ?)
)
SELECT m.*, part.is_summary FROM part JOIN messages m ON m.id = part.id ORDER BY part.k DESC
"""
_FIRST = f"WITH RECURSIVE {_UP.format(last=_MESSAGE)} SELECT id, k FROM up ORDER BY k DESC LIMIT 1"
_NUMBERED = f"""
WITH RECURSIVE {_UP.format(last=_MESSAGE)} SELECT id FROM up WHERE k > 0 ORDER BY k DESC LIMIT 1 OFFSET ?
"""
_LINE = f"{_DOWN} SELECT m.id, m.size FROM down JOIN messages m ON m.id = down.id ORDER BY down.n"
_ALL = "SELECT id, size FROM messages WHERE chat_id = ? AND owner = ? AND trash_id IS NULL ORDER BY position"
PIECE_MESSAGES, PIECE_CHARACTERS = 100, 1 << 18
_FILES = f"""
WITH RECURSIVE {_UP.format(last=_MESSAGE)}
SELECT m.attachments FROM up JOIN messages m ON m.id = up.id WHERE m.attachments <> '[]' AND up.k > 0 ORDER BY up.k DESC
"""


def load_branch_end(
    db: Database, owner: str, chat_id: str, *, limit: int, through: str | None, first: str | None
) -> tuple[tuple[ShownMessage, ...], int]:
    """Return a branch's end (see ChatStore.shown_chat) and the number of messages before it."""
    chat_key = (chat_id, owner)
    # Send both statements before reading a result, so that PostgreSQL needs only one round trip.
    found = db.execute(_END, (through, *(chat_key * 4), MOST_SHOWN, limit))
    above = db.execute(_DEPTH, (through, *chat_key, _NO_END)) if through is not None else None
    line = found.fetchall()
    if not line:
        return (), 0
    depth = above.fetchone()["depth"] if above is not None else None
    count = line[0]["below"] + (depth or 0) + 1
    since_first = next((at + 1 for at, row in enumerate(line[:MOST_SHOWN]) if row["id"] == first), 0)
    path = _load_shown(db, owner, chat_id, line, 0, max(limit, since_first))
    return path, count - len(path)


def query_last_shown(db: Database, owner: str, chat_id: str) -> Rows:
    """Query the id of the shown branch's last message."""
    return db.execute(_DOWN + _LAST, (None, *((chat_id, owner) * 4)))


def pieces(db: Database, owner: str, chat_id: str, *, shown: bool) -> list[list[str]]:
    """Return the ids of all messages, or of the shown branch, in chunks of limited size."""
    chat_key = (chat_id, owner)
    chunks, size = list[list[str]](), 0
    for row in db.execute(_LINE, (None, *(chat_key * 4))) if shown else db.execute(_ALL, chat_key):
        if not chunks or len(chunks[-1]) == PIECE_MESSAGES or size + row["size"] > PIECE_CHARACTERS:
            chunks.append([])
            size = 0
        chunks[-1].append(row["id"])
        size += row["size"]
    return chunks


def piece(db: Database, owner: str, ids: list[str]) -> list[StoredMessage]:
    """Load messages in the order of `ids`, skipping those deleted in the meantime."""
    sql = f"SELECT * FROM messages WHERE id IN ({placeholders(ids)}) AND owner = ? AND trash_id IS NULL"
    messages = {row["id"]: message_from_row(row) for row in db.execute(sql, (*ids, owner))}
    return [messages[each] for each in ids if each in messages]


def load_prompt_branch(
    db: Database, owner: str, chat_id: str, last: str | None, *, most_characters: int | None
) -> tuple[tuple[StoredMessage, ...], str | None, int, bool]:
    """Return the fields `line`, `first_id`, `above` and `summarized` of a Branch."""
    chat_key = (chat_id, owner)
    limits = (_NO_END, _NO_END if most_characters is None else most_characters, most_characters is not None)
    if last is None:
        found = db.execute(f"{_DOWN}, {_PART.format(last=_LAST)}", (None, *(chat_key * 4), *limits))
    else:
        found = db.execute(f"WITH RECURSIVE {_PART.format(last=_MESSAGE)}", (last, *chat_key, *limits))
    rows = found.fetchall()
    if not rows:
        return (), None, 0, False
    top = rows[0]
    line = tuple(message_from_row(row) for row in rows)
    if top["parent_id"] is None:
        return line, line[0].id, 0, bool(top["is_summary"])
    first = db.execute(_FIRST, (line[0].id, *chat_key, _NO_END)).fetchone()
    return line, first["id"], first["k"], bool(top["is_summary"])


def load_earlier_attachments(db: Database, owner: str, chat_id: str, message_id: str) -> list[str]:
    """Return the attachments of the messages before `message_id` as JSON, oldest first."""
    rows = db.execute(_FILES, (message_id, chat_id, owner, _NO_END))
    return [row["attachments"] for row in rows]


def load_shown_before(
    db: Database, owner: str, chat_id: str, message_id: str, *, limit: int, first: int | None
) -> tuple[tuple[ShownMessage, ...], int] | None:
    key = (message_id, chat_id, owner)
    if first is not None:
        row = db.execute(_NUMBERED, (*key, _NO_END, first)).fetchone()
        if row is None:
            return None
        key = (row["id"], chat_id, owner)
    found = db.execute(_ABOVE, (*key, MOST_SHOWN, limit + 1))
    above = db.execute(_DEPTH, (*key, _NO_END))
    line = found.fetchall()
    if not line:
        return None
    path = _load_shown(db, owner, chat_id, line, 1, limit)
    return path, above.fetchone()["depth"] - len(path)


def load_shown_message(db: Database, owner: str, chat_id: str, message_id: str) -> ShownMessage | None:
    line = db.execute(_ABOVE, (message_id, chat_id, owner, MOST_SHOWN, 0)).fetchall()
    return _load_shown(db, owner, chat_id, line, 0, 1, whole_turns=False)[0] if line else None


def _load_shown(
    db: Database, owner: str, chat_id: str, line: list[Any], begin: int, limit: int, *, whole_turns: bool = True
) -> tuple[ShownMessage, ...]:
    # `line` starts with the newest message.
    sizes = _query_sizes(db, owner, line[begin:], min(limit + 1, PIECE_MESSAGES))
    end = begin + (count_shown(sizes, limit) if whole_turns else limit)
    rows = line[begin:end]
    if not rows:
        return ()
    ids, parents = [row["id"] for row in rows], [row["parent_id"] for row in rows if row["parent_id"] is not None]
    found = db.execute(f"SELECT * FROM messages WHERE id IN ({placeholders(ids)}) AND owner = ?", (*ids, owner))
    siblings = []
    if parents:
        sql = (
            f"SELECT parent_id, id FROM messages WHERE parent_id IN ({placeholders(parents)}) AND owner = ?"
            " AND trash_id IS NULL ORDER BY position"
        )
        siblings.append(db.execute(sql, (*parents, owner)))
    if len(parents) < len(rows):
        sql = f"SELECT parent_id, id FROM messages WHERE {_ROOT} ORDER BY position"
        siblings.append(db.execute(sql, (chat_id, owner)))
    messages = {row["id"]: message_from_row(row) for row in found}
    versions: dict[str | None, list[str]] = {}
    for row in chain.from_iterable(siblings):
        versions.setdefault(row["parent_id"], []).append(row["id"])
    below = next((row["id"] for row in reversed(line[:begin]) if row["role"] == "user"), None)
    path: list[ShownMessage] = []
    for at, row in enumerate(rows, begin):
        above = next((other["id"] for other in islice(line, at + 1, None) if other["role"] == "user"), None)
        message = messages.get(row["id"])
        if message is not None:
            path.append(ShownMessage(message, tuple(versions[row["parent_id"]]), above, below))
        below = row["id"] if row["role"] == "user" else below
    return tuple(reversed(path))


def _query_sizes(db: Database, owner: str, line: list[Any], chunk: int) -> Iterator[tuple[str, int]]:
    known = [(row["role"], row["size"]) for row in takewhile(lambda row: row["size"] is not None, line)]
    yield from known
    for at in range(len(known), len(line), chunk):
        ids = [row["id"] for row in line[at : at + chunk]]
        sql = f"SELECT id, size FROM messages WHERE id IN ({placeholders(ids)}) AND owner = ?"
        sizes = {row["id"]: row["size"] for row in db.execute(sql, (*ids, owner))}
        yield from ((row["role"], sizes.get(row["id"], 0)) for row in line[at : at + chunk])
