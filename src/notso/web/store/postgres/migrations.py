"""PostgreSQL schema as numbered, forward-only migrations. Never edit a released migration.

Identifiers and texts use COLLATE "C", so that they are compared byte by byte in all locales, as in SQLite.
"""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE chats (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        title TEXT COLLATE "C" NOT NULL,
        thinking BOOLEAN NOT NULL,
        prompt_date TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL,
        updated_ms BIGINT NOT NULL,
        pinned BOOLEAN NOT NULL DEFAULT FALSE,
        settings TEXT COLLATE "C" NOT NULL DEFAULT '{}',
        chosen_root TEXT COLLATE "C",
        trash_id TEXT COLLATE "C",
        unread BOOLEAN NOT NULL DEFAULT FALSE,
        archived BOOLEAN NOT NULL DEFAULT FALSE,
        temporary BOOLEAN NOT NULL DEFAULT FALSE
    );
    CREATE INDEX chats_by_use ON chats (owner, updated_ms DESC);
    CREATE INDEX chats_in_trash ON chats (trash_id) WHERE trash_id IS NOT NULL;
    CREATE INDEX temporary_chats ON chats (updated_ms) WHERE temporary;

    CREATE TABLE messages (
        id TEXT COLLATE "C" PRIMARY KEY,
        chat_id TEXT COLLATE "C" NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        owner TEXT COLLATE "C" NOT NULL,
        parent_id TEXT COLLATE "C" REFERENCES messages (id) ON DELETE CASCADE DEFERRABLE,
        position BIGINT NOT NULL,
        role TEXT COLLATE "C" NOT NULL CHECK (role IN ('user', 'assistant')),
        content TEXT COLLATE "C" NOT NULL,
        reasoning TEXT COLLATE "C" NOT NULL DEFAULT '',
        state TEXT COLLATE "C" NOT NULL
            CHECK (state IN ('queued', 'running', 'done', 'stopped', 'failed', 'interrupted')),
        generation_id TEXT COLLATE "C" UNIQUE,
        idempotency_key TEXT COLLATE "C",
        note TEXT COLLATE "C" NOT NULL DEFAULT '',
        prompt_tokens BIGINT NOT NULL DEFAULT 0,
        cached_tokens BIGINT NOT NULL DEFAULT 0,
        completion_tokens BIGINT NOT NULL DEFAULT 0,
        reasoning_tokens BIGINT NOT NULL DEFAULT 0,
        prompt_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
        completion_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
        thinking_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
        queue_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
        first_token_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
        answer_html TEXT COLLATE "C" NOT NULL DEFAULT '',
        reasoning_html TEXT COLLATE "C" NOT NULL DEFAULT '',
        renderer BIGINT NOT NULL DEFAULT 0,
        created_ms BIGINT NOT NULL,
        kind TEXT COLLATE "C" NOT NULL DEFAULT 'turn' CHECK (kind IN ('turn', 'summary')),
        chosen_child TEXT COLLATE "C",
        edited BOOLEAN NOT NULL DEFAULT FALSE,
        attachments TEXT COLLATE "C" NOT NULL DEFAULT '[]',
        dropped_messages BIGINT NOT NULL DEFAULT 0,
        trash_id TEXT COLLATE "C",
        tool_uses TEXT COLLATE "C" NOT NULL DEFAULT '[]',
        holder TEXT COLLATE "C"
    );
    CREATE INDEX messages_in_order ON messages (chat_id, position);
    CREATE INDEX messages_by_parent ON messages (parent_id);
    CREATE INDEX messages_in_trash ON messages (trash_id) WHERE trash_id IS NOT NULL;
    CREATE INDEX messages_by_holder ON messages (holder) WHERE holder IS NOT NULL;
    CREATE UNIQUE INDEX one_question_per_key ON messages (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
    CREATE UNIQUE INDEX one_turn_per_chat ON messages (chat_id)
        WHERE state IN ('queued', 'running') AND trash_id IS NULL;

    CREATE TABLE trash (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        chat_id TEXT COLLATE "C" NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('chat', 'messages')),
        settings TEXT COLLATE "C" NOT NULL,
        chosen_root TEXT COLLATE "C",
        thrown_ms BIGINT NOT NULL
    );
    CREATE INDEX trash_by_chat ON trash (chat_id);

    CREATE TABLE preferences (owner TEXT COLLATE "C" PRIMARY KEY, settings TEXT COLLATE "C" NOT NULL);

    CREATE TABLE prompts (
        owner TEXT COLLATE "C" NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('message', 'instructions')),
        text TEXT COLLATE "C" NOT NULL,
        PRIMARY KEY (owner, name)
    );

    CREATE TABLE responses (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        previous_id TEXT COLLATE "C",
        body TEXT COLLATE "C" NOT NULL,
        conversation TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL,
        input TEXT COLLATE "C" NOT NULL DEFAULT '[]',
        rowid BIGINT GENERATED ALWAYS AS IDENTITY
    );
    CREATE INDEX responses_in_order ON responses (owner, rowid);

    CREATE TABLE indexed (
        owner TEXT COLLATE "C" NOT NULL,
        chat_id TEXT COLLATE "C" NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        message_id TEXT COLLATE "C" UNIQUE REFERENCES messages (id) ON DELETE CASCADE,
        words TSVECTOR NOT NULL
    );
    CREATE UNIQUE INDEX one_title_per_chat ON indexed (chat_id) WHERE message_id IS NULL;
    CREATE INDEX indexed_by_chat ON indexed (chat_id);
    CREATE INDEX indexed_by_word ON indexed USING gin (words);

    CREATE TABLE replicas (id TEXT COLLATE "C" PRIMARY KEY, expires TIMESTAMPTZ NOT NULL);

    CREATE TABLE orphans (
        generation_id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        chat_id TEXT COLLATE "C" NOT NULL,
        message_id TEXT COLLATE "C" NOT NULL
    );

    CREATE TABLE forgotten (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        first_message_id TEXT COLLATE "C" NOT NULL,
        since TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
    );
    """,
    """
    CREATE TABLE keys (
        id TEXT COLLATE "C" PRIMARY KEY,
        name TEXT COLLATE "C" NOT NULL,
        digest BYTEA NOT NULL UNIQUE,
        created_ms BIGINT NOT NULL,
        requests_per_minute BIGINT NOT NULL,
        tokens_per_day BIGINT NOT NULL,
        is_operator BOOLEAN NOT NULL,
        revoked_ms BIGINT NOT NULL
    );
    CREATE UNIQUE INDEX one_key_per_name ON keys (name) WHERE revoked_ms = 0;

    CREATE TABLE usage (
        day TEXT COLLATE "C" NOT NULL,
        owner TEXT COLLATE "C" NOT NULL,
        requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL,
        PRIMARY KEY (day, owner)
    );

    CREATE TABLE audit (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at_ms BIGINT NOT NULL,
        owner TEXT COLLATE "C" NOT NULL,
        action TEXT COLLATE "C" NOT NULL,
        address TEXT COLLATE "C" NOT NULL
    );
    """,
    "ALTER TABLE keys ADD COLUMN requests_per_day BIGINT NOT NULL DEFAULT 0",
    """
    DROP INDEX messages_by_parent;
    CREATE INDEX messages_below ON messages (parent_id, position);
    CREATE INDEX first_messages ON messages (chat_id, position) WHERE parent_id IS NULL;
    CREATE INDEX chats_in_list ON chats (owner, pinned DESC, updated_ms DESC, id DESC) WHERE trash_id IS NULL;
    CREATE INDEX unread_chats ON chats (owner) WHERE unread;

    ALTER TABLE messages ADD COLUMN size BIGINT NOT NULL DEFAULT 0;
    UPDATE messages SET size = 500 + length(content) + length(reasoning) + length(attachments) + length(tool_uses);
    CREATE INDEX sizes_of_owners ON messages (owner, size);
    """,
    """
    CREATE TABLE reservations (
        id TEXT COLLATE "C" PRIMARY KEY,
        day TEXT COLLATE "C" NOT NULL,
        owner TEXT COLLATE "C" NOT NULL,
        tokens BIGINT NOT NULL,
        until_ms BIGINT NOT NULL
    );
    CREATE INDEX reservations_by_owner ON reservations (owner, day);
    """,
    """
    ALTER TABLE audit ADD COLUMN count BIGINT NOT NULL DEFAULT 1;
    CREATE TABLE operator_audit (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at_ms BIGINT NOT NULL,
        owner TEXT COLLATE "C" NOT NULL,
        action TEXT COLLATE "C" NOT NULL,
        address TEXT COLLATE "C" NOT NULL,
        count BIGINT NOT NULL
    );
    """,
    """
    CREATE TABLE api_files (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        purpose TEXT COLLATE "C" NOT NULL,
        size BIGINT NOT NULL,
        created_ms BIGINT NOT NULL,
        expires_ms BIGINT NOT NULL
    );
    CREATE INDEX api_files_of_owners ON api_files (owner, created_ms);
    CREATE TABLE api_file_parts (
        file_id TEXT COLLATE "C" NOT NULL,
        part BIGINT NOT NULL,
        content BYTEA NOT NULL,
        PRIMARY KEY (file_id, part)
    );
    CREATE TABLE api_batches (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL,
        body TEXT COLLATE "C" NOT NULL,
        plan TEXT COLLATE "C" NOT NULL,
        is_open BOOLEAN NOT NULL,
        holder TEXT COLLATE "C" NOT NULL DEFAULT '',
        held_until_ms BIGINT NOT NULL DEFAULT 0
    );
    CREATE INDEX api_batches_of_owners ON api_batches (owner, created_ms);
    CREATE INDEX open_api_batches ON api_batches (created_ms) WHERE is_open;
    CREATE TABLE kept_answers (
        owner TEXT COLLATE "C" NOT NULL,
        idempotency_key TEXT COLLATE "C" NOT NULL,
        digest BYTEA NOT NULL,
        status INTEGER NOT NULL,
        headers TEXT COLLATE "C" NOT NULL,
        body BYTEA NOT NULL,
        created_ms BIGINT NOT NULL,
        PRIMARY KEY (owner, idempotency_key)
    );
    CREATE INDEX kept_answers_by_age ON kept_answers (created_ms);
    """,
    # 8: models of answers; sources of imported chats and messages. The sources are kept when a message is deleted.
    """
    ALTER TABLE messages ADD COLUMN model TEXT COLLATE "C" NOT NULL DEFAULT '';
    ALTER TABLE chats ADD COLUMN source TEXT COLLATE "C" NOT NULL DEFAULT '';
    CREATE INDEX chats_by_source ON chats (owner, source) WHERE source <> '';
    CREATE TABLE imported_messages (
        chat_id TEXT COLLATE "C" NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        source TEXT COLLATE "C" NOT NULL,
        message_id TEXT COLLATE "C" REFERENCES messages (id) ON DELETE SET NULL DEFERRABLE,
        PRIMARY KEY (chat_id, source)
    );
    CREATE INDEX imported_by_message ON imported_messages (message_id);
    """,
    # 9: no statements; all texts are indexed again (see REINDEXES).
    "SELECT 1",
    """
    ALTER TABLE messages ADD COLUMN rating INTEGER NOT NULL DEFAULT 0 CHECK (rating IN (-1, 0, 1));
    CREATE TABLE shares (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        chat_id TEXT COLLATE "C" NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        message_id TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL,
        expires_ms BIGINT NOT NULL
    );
    CREATE INDEX shares_of_chats ON shares (chat_id);
    """,
    # 11: libraries. A document's file, text and words are rows, so that one transaction can add or delete a document.
    """
    CREATE TABLE libraries (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT COLLATE "C" NOT NULL UNIQUE,
        owner TEXT COLLATE "C" NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        salt TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL,
        UNIQUE (owner, name)
    );
    CREATE TABLE documents (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT COLLATE "C" NOT NULL UNIQUE,
        library_id TEXT COLLATE "C" NOT NULL REFERENCES libraries (id) DEFERRABLE,
        name TEXT COLLATE "C" NOT NULL,
        sha256 TEXT COLLATE "C" NOT NULL,
        size BIGINT NOT NULL,
        created_ms BIGINT NOT NULL,
        reading_day TEXT COLLATE "C" NOT NULL,
        state TEXT COLLATE "C" NOT NULL CHECK (state IN ('queued', 'parsing', 'ready', 'failed')),
        reason TEXT COLLATE "C" NOT NULL DEFAULT '',
        note TEXT COLLATE "C" NOT NULL DEFAULT '',
        kind TEXT COLLATE "C" NOT NULL DEFAULT '',
        pages BIGINT NOT NULL DEFAULT 0,
        characters BIGINT NOT NULL DEFAULT 0,
        passages BIGINT NOT NULL DEFAULT 0,
        words BIGINT NOT NULL DEFAULT 0,
        held_until_ms BIGINT NOT NULL DEFAULT 0,
        UNIQUE (library_id, sha256)
    );
    CREATE INDEX unparsed_documents ON documents (created_ms) WHERE state IN ('queued', 'parsing');
    CREATE TABLE document_parts (
        document_id TEXT COLLATE "C" NOT NULL REFERENCES documents (id) DEFERRABLE,
        part BIGINT NOT NULL,
        content BYTEA NOT NULL,
        PRIMARY KEY (document_id, part)
    );
    CREATE TABLE document_texts (
        document_id TEXT COLLATE "C" PRIMARY KEY REFERENCES documents (id) DEFERRABLE,
        text BYTEA NOT NULL,
        pages TEXT COLLATE "C" NOT NULL,
        passages TEXT COLLATE "C" NOT NULL
    );
    CREATE TABLE document_words (
        library BIGINT NOT NULL,
        word TEXT COLLATE "C" NOT NULL,
        document BIGINT NOT NULL,
        places BYTEA NOT NULL,
        PRIMARY KEY (library, word, document)
    );
    CREATE INDEX words_of_documents ON document_words (document);
    CREATE TABLE chat_documents (
        message_id TEXT COLLATE "C" NOT NULL REFERENCES messages (id) ON DELETE CASCADE DEFERRABLE,
        document_id TEXT COLLATE "C" NOT NULL REFERENCES documents (id) DEFERRABLE,
        chat_id TEXT COLLATE "C" NOT NULL,
        PRIMARY KEY (message_id, document_id)
    );
    CREATE INDEX chats_of_documents ON chat_documents (document_id);
    CREATE TABLE readings (
        scope TEXT COLLATE "C" NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        document_id TEXT COLLATE "C" NOT NULL REFERENCES documents (id) DEFERRABLE,
        PRIMARY KEY (scope, name, document_id)
    );
    CREATE INDEX readings_of_documents ON readings (document_id);
    CREATE TABLE stale_caches (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        conversation TEXT COLLATE "C" NOT NULL,
        scope TEXT COLLATE "C" NOT NULL,
        reading TEXT COLLATE "C" NOT NULL,
        since_ms BIGINT NOT NULL
    );
    """,
    # 12: records with which another process can continue answers and background responses.
    """
    CREATE TABLE answer_traces (
        message_id TEXT COLLATE "C" PRIMARY KEY REFERENCES messages (id) ON DELETE CASCADE DEFERRABLE,
        trace TEXT NOT NULL,
        tries BIGINT NOT NULL,
        resumes BIGINT NOT NULL
    );
    CREATE TABLE open_responses (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        body TEXT COLLATE "C" NOT NULL,
        caller TEXT COLLATE "C" NOT NULL,
        seed BIGINT NOT NULL,
        created_ms BIGINT NOT NULL,
        tries BIGINT NOT NULL DEFAULT 0,
        holder TEXT COLLATE "C" NOT NULL,
        held_until_ms BIGINT NOT NULL
    );
    """,
    """
    ALTER TABLE libraries ADD COLUMN instructions TEXT COLLATE "C" NOT NULL DEFAULT '';
    ALTER TABLE libraries ADD COLUMN settings TEXT COLLATE "C" NOT NULL DEFAULT '{}';
    CREATE TABLE library_members (
        library_id TEXT COLLATE "C" NOT NULL REFERENCES libraries (id) ON DELETE CASCADE DEFERRABLE,
        member TEXT COLLATE "C" NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        rights TEXT COLLATE "C" NOT NULL CHECK (rights IN ('add', 'read')),
        PRIMARY KEY (library_id, member)
    );
    CREATE INDEX libraries_of_members ON library_members (member);
    CREATE VIEW library_readers (library_id, reader, rights) AS
        SELECT id, owner, 'own' COLLATE "C" FROM libraries
        UNION ALL SELECT library_id, member, rights FROM library_members;
    ALTER TABLE chats ADD COLUMN project TEXT COLLATE "C" NOT NULL DEFAULT '';
    CREATE INDEX chats_of_projects ON chats (project) WHERE project <> '';
    CREATE TABLE memories (
        id TEXT COLLATE "C" PRIMARY KEY,
        owner TEXT COLLATE "C" NOT NULL,
        text TEXT COLLATE "C" NOT NULL,
        created_ms BIGINT NOT NULL
    );
    CREATE INDEX memories_of_owners ON memories (owner, created_ms);
    """,
    """
    ALTER TABLE messages ADD COLUMN citations TEXT COLLATE "C" NOT NULL DEFAULT '[]';
    """,
    # 15: progress of unfinished responses and of streams with X-Conversation-Id, so that both can be continued.
    """
    ALTER TABLE open_responses ADD COLUMN path TEXT COLLATE "C" NOT NULL DEFAULT '/v1/responses';
    ALTER TABLE open_responses ADD COLUMN headers TEXT COLLATE "C" NOT NULL DEFAULT '{}';
    ALTER TABLE open_responses ADD COLUMN conversation TEXT COLLATE "C" NOT NULL DEFAULT '';
    ALTER TABLE open_responses ADD COLUMN progress TEXT COLLATE "C" NOT NULL DEFAULT '';
    """,
    # 16: tokens of unfinished responses in parts, so that each save stores only the new tokens.
    """
    CREATE TABLE response_tokens (
        response_id TEXT COLLATE "C" NOT NULL REFERENCES open_responses (id) ON DELETE CASCADE DEFERRABLE,
        first BIGINT NOT NULL,
        told TEXT COLLATE "C" NOT NULL,
        PRIMARY KEY (response_id, first)
    );
    """,
    # 17: stale caches of deleted conversations are moved to the table of all stale caches.
    """
    INSERT INTO stale_caches (owner, conversation, scope, reading, since_ms)
        SELECT owner, first_message_id, '', '', CAST(extract(epoch FROM since) * 1000 AS BIGINT)
        FROM forgotten ORDER BY number;
    DROP TABLE forgotten;
    """,
    # 18: the version of the reader that produced each text, so that outdated texts can be replaced.
    """
    ALTER TABLE documents ADD COLUMN reader BIGINT NOT NULL DEFAULT 0;
    CREATE INDEX outdated_documents ON documents (created_ms) WHERE held_until_ms < 0;
    """,
)

REINDEXES = frozenset({9})
"""Versions after which all texts are indexed again, because the tokenizer changed."""

SCHEMA_VERSION = len(MIGRATIONS)
