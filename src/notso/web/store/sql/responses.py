"""Responses that programs asked to be kept, written and read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from notso.smollm3 import Message, ToolCall
from notso.web.store.protocol import StoredResponse
from notso.web.store.sql.database import Database

MOST_KEPT = 1000


def save_response(db: Database, owner: str, response: StoredResponse) -> None:
    """Keep one, or keep it once more. The oldest go when there are more than enough: by the order in which they came,
    for by the time of day the newest could go, if that was set back."""
    db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response.id, owner))
    db.execute(
        "INSERT INTO responses (id, owner, previous_id, body, conversation, created_ms, input)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            response.id,
            owner,
            response.previous_id,
            json.dumps(response.body, ensure_ascii=False),
            json.dumps([asdict(message) for message in response.conversation], ensure_ascii=False),
            response.created_ms,
            json.dumps(response.input, ensure_ascii=False),
        ),
    )
    db.execute(
        "DELETE FROM responses WHERE owner = ? AND rowid NOT IN"
        " (SELECT rowid FROM responses WHERE owner = ? ORDER BY rowid DESC LIMIT ?)",
        (owner, owner, MOST_KEPT),
    )


def response_of(row: Any) -> StoredResponse:
    """One as it was kept."""
    messages = tuple(_message(entry) for entry in json.loads(row["conversation"]))
    body, items = json.loads(row["body"]), tuple(json.loads(row["input"]))
    return StoredResponse(row["id"], row["previous_id"], body, messages, row["created_ms"], items)


def _message(entry: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in entry.pop("tool_calls"))
    return Message(**entry, tool_calls=calls)
