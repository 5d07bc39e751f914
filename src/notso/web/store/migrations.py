"""The schema, as numbered steps that only go forward. A released step is never edited."""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE chats (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        title TEXT NOT NULL,
        thinking INTEGER NOT NULL CHECK (thinking IN (0, 1)),
        prompt_date TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        updated_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX chats_by_use ON chats (owner, updated_ms DESC);

    CREATE TABLE messages (
        id TEXT PRIMARY KEY,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        owner TEXT NOT NULL,
        parent_id TEXT REFERENCES messages (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        content TEXT NOT NULL,
        reasoning TEXT NOT NULL DEFAULT '',
        state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'stopped', 'failed', 'interrupted')),
        generation_id TEXT UNIQUE,
        idempotency_key TEXT,
        note TEXT NOT NULL DEFAULT '',
        prompt_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER NOT NULL DEFAULT 0,
        completion_tokens INTEGER NOT NULL DEFAULT 0,
        reasoning_tokens INTEGER NOT NULL DEFAULT 0,
        prompt_ms REAL NOT NULL DEFAULT 0,
        completion_ms REAL NOT NULL DEFAULT 0,
        thinking_ms REAL NOT NULL DEFAULT 0,
        answer_html TEXT NOT NULL DEFAULT '',
        reasoning_html TEXT NOT NULL DEFAULT '',
        renderer INTEGER NOT NULL DEFAULT 0,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX messages_in_order ON messages (chat_id, position);
    CREATE INDEX messages_by_parent ON messages (parent_id);
    CREATE UNIQUE INDEX one_question_per_key ON messages (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
    CREATE UNIQUE INDEX one_turn_per_chat ON messages (chat_id) WHERE state IN ('queued', 'running');

    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)
