"""Define the SQLite schema as numbered, forward-only migrations. Never edit a released migration."""

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
    """
    ALTER TABLE chats ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0 CHECK (pinned IN (0, 1));
    ALTER TABLE chats ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE chats ADD COLUMN chosen_root TEXT;
    ALTER TABLE chats ADD COLUMN trash_id TEXT;

    ALTER TABLE messages ADD COLUMN kind TEXT NOT NULL DEFAULT 'turn' CHECK (kind IN ('turn', 'summary'));
    ALTER TABLE messages ADD COLUMN chosen_child TEXT;
    ALTER TABLE messages ADD COLUMN edited INTEGER NOT NULL DEFAULT 0 CHECK (edited IN (0, 1));
    ALTER TABLE messages ADD COLUMN attachments TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE messages ADD COLUMN dropped_messages INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE messages ADD COLUMN first_token_ms REAL NOT NULL DEFAULT 0;
    ALTER TABLE messages ADD COLUMN queue_ms REAL NOT NULL DEFAULT 0;
    ALTER TABLE messages ADD COLUMN trash_id TEXT;
    DROP INDEX one_turn_per_chat;
    CREATE UNIQUE INDEX one_turn_per_chat ON messages (chat_id)
        WHERE state IN ('queued', 'running') AND trash_id IS NULL;

    CREATE TABLE trash (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        kind TEXT NOT NULL CHECK (kind IN ('chat', 'messages')),
        settings TEXT NOT NULL,
        chosen_root TEXT,
        thrown_ms INTEGER NOT NULL
    ) STRICT;

    CREATE TABLE preferences (owner TEXT PRIMARY KEY, settings TEXT NOT NULL) STRICT;

    CREATE VIRTUAL TABLE texts USING fts5(body, tokenize = "unicode61 remove_diacritics 2");
    CREATE TABLE indexed (
        number INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        message_id TEXT UNIQUE REFERENCES messages (id) ON DELETE CASCADE
    ) STRICT;
    CREATE UNIQUE INDEX one_title_per_chat ON indexed (chat_id) WHERE message_id IS NULL;
    CREATE INDEX indexed_by_chat ON indexed (chat_id);
    INSERT INTO indexed (owner, chat_id) SELECT owner, id FROM chats;
    INSERT INTO indexed (owner, chat_id, message_id) SELECT owner, chat_id, id FROM messages WHERE content <> '';
    INSERT INTO texts (rowid, body) SELECT number, title FROM indexed JOIN chats ON chats.id = indexed.chat_id
        WHERE message_id IS NULL;
    INSERT INTO texts (rowid, body) SELECT number, content FROM indexed
        JOIN messages ON messages.id = indexed.message_id;
    """,
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        previous_id TEXT,
        body TEXT NOT NULL,
        conversation TEXT NOT NULL,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX responses_by_age ON responses (owner, created_ms);
    """,
    """
    ALTER TABLE messages ADD COLUMN tool_uses TEXT NOT NULL DEFAULT '[]';
    """,
    """
    ALTER TABLE responses ADD COLUMN input TEXT NOT NULL DEFAULT '[]';
    """,
    """
    ALTER TABLE chats ADD COLUMN unread INTEGER NOT NULL DEFAULT 0 CHECK (unread IN (0, 1));
    ALTER TABLE chats ADD COLUMN archived INTEGER NOT NULL DEFAULT 0 CHECK (archived IN (0, 1));
    ALTER TABLE chats ADD COLUMN temporary INTEGER NOT NULL DEFAULT 0 CHECK (temporary IN (0, 1));
    CREATE TABLE prompts (
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('message', 'instructions')),
        text TEXT NOT NULL,
        PRIMARY KEY (owner, name)
    ) STRICT;
    """,
    # 7: message sizes; covering indexes, so that queries for branches, sorted lists and the total size of an owner's
    # messages read no message rows.
    """
    DROP INDEX messages_by_parent;
    CREATE INDEX messages_below ON messages (parent_id, position, id, chosen_child, trash_id, owner);
    CREATE INDEX first_messages ON messages (chat_id, position) WHERE parent_id IS NULL;
    CREATE INDEX chats_in_list ON chats (owner, pinned DESC, updated_ms DESC, id DESC) WHERE trash_id IS NULL;
    CREATE INDEX unread_chats ON chats (owner) WHERE unread;

    ALTER TABLE messages ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
    UPDATE messages SET size = 500 + length(content) + length(reasoning) + length(attachments) + length(tool_uses);
    CREATE INDEX sizes_of_owners ON messages (owner, size);
    """,
    # 8: SQLite's query planner assumes ten messages per owner, so it preferred sizes_of_owners to the index of ids. As
    # a partial index, sizes_of_owners is used only for the sum of sizes.
    """
    DROP INDEX sizes_of_owners;
    CREATE INDEX sizes_of_owners ON messages (owner, size) WHERE size > 0;
    CREATE INDEX chats_in_trash ON chats (trash_id) WHERE trash_id IS NOT NULL;
    """,
    """
    CREATE TABLE api_files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size INTEGER NOT NULL,
        created_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX api_files_of_owners ON api_files (owner, created_ms);
    CREATE TABLE api_file_parts (
        file_id TEXT NOT NULL,
        part INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (file_id, part)
    ) STRICT;
    CREATE TABLE api_batches (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        body TEXT NOT NULL,
        plan TEXT NOT NULL,
        is_open INTEGER NOT NULL CHECK (is_open IN (0, 1)),
        holder TEXT NOT NULL DEFAULT '',
        held_until_ms INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE INDEX api_batches_of_owners ON api_batches (owner, created_ms);
    CREATE INDEX open_api_batches ON api_batches (created_ms) WHERE is_open;
    CREATE TABLE kept_answers (
        owner TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        digest BLOB NOT NULL,
        status INTEGER NOT NULL,
        headers TEXT NOT NULL,
        body BLOB NOT NULL,
        created_ms INTEGER NOT NULL,
        PRIMARY KEY (owner, idempotency_key)
    ) STRICT;
    CREATE INDEX kept_answers_by_age ON kept_answers (created_ms);
    """,
    # 10: the model of each answer; the sources of imported chats and messages, kept even if the message is deleted.
    """
    ALTER TABLE messages ADD COLUMN model TEXT NOT NULL DEFAULT '';
    ALTER TABLE chats ADD COLUMN source TEXT NOT NULL DEFAULT '';
    CREATE INDEX chats_by_source ON chats (owner, source) WHERE source <> '';
    CREATE TABLE imported_messages (
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        source TEXT NOT NULL,
        message_id TEXT REFERENCES messages (id) ON DELETE SET NULL,
        PRIMARY KEY (chat_id, source)
    ) STRICT;
    CREATE INDEX imported_by_message ON imported_messages (message_id);
    """,
    # 11: the search index contains the words that `indexed_text` extracts (module search_words), as in PostgreSQL.
    """
    DROP TABLE texts;
    CREATE VIRTUAL TABLE texts USING fts5(body, tokenize = "unicode61 remove_diacritics 0 tokenchars '+#'");
    CREATE VIRTUAL TABLE vocabulary USING fts5vocab(texts, row);
    INSERT INTO texts (rowid, body) SELECT number, indexed_text(title) FROM indexed
        JOIN chats ON chats.id = indexed.chat_id WHERE message_id IS NULL;
    INSERT INTO texts (rowid, body) SELECT number, indexed_text(content) FROM indexed
        JOIN messages ON messages.id = indexed.message_id;
    """,
    """
    ALTER TABLE messages ADD COLUMN rating INTEGER NOT NULL DEFAULT 0 CHECK (rating IN (-1, 0, 1));
    CREATE TABLE shares (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        message_id TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX shares_of_chats ON shares (chat_id);
    """,
    # 13: libraries. A document's file, text and words are rows, so that one transaction can add or delete a document.
    """
    CREATE TABLE libraries (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        salt TEXT NOT NULL,
        created_ms INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) STRICT;
    CREATE TABLE documents (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        library_id TEXT NOT NULL REFERENCES libraries (id),
        name TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        size INTEGER NOT NULL,
        created_ms INTEGER NOT NULL,
        reading_day TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('queued', 'parsing', 'ready', 'failed')),
        reason TEXT NOT NULL DEFAULT '',
        note TEXT NOT NULL DEFAULT '',
        kind TEXT NOT NULL DEFAULT '',
        pages INTEGER NOT NULL DEFAULT 0,
        characters INTEGER NOT NULL DEFAULT 0,
        passages INTEGER NOT NULL DEFAULT 0,
        words INTEGER NOT NULL DEFAULT 0,
        held_until_ms INTEGER NOT NULL DEFAULT 0,
        UNIQUE (library_id, sha256)
    ) STRICT;
    CREATE INDEX unparsed_documents ON documents (created_ms) WHERE state IN ('queued', 'parsing');
    CREATE TABLE document_parts (
        document_id TEXT NOT NULL REFERENCES documents (id),
        part INTEGER NOT NULL,
        content BLOB NOT NULL,
        PRIMARY KEY (document_id, part)
    ) STRICT;
    CREATE TABLE document_texts (
        document_id TEXT PRIMARY KEY REFERENCES documents (id),
        text BLOB NOT NULL,
        pages TEXT NOT NULL,
        passages TEXT NOT NULL
    ) STRICT;
    CREATE TABLE document_words (
        library INTEGER NOT NULL,
        word TEXT NOT NULL,
        document INTEGER NOT NULL,
        places BLOB NOT NULL,
        PRIMARY KEY (library, word, document)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX words_of_documents ON document_words (document);
    CREATE TABLE chat_documents (
        message_id TEXT NOT NULL REFERENCES messages (id) ON DELETE CASCADE,
        document_id TEXT NOT NULL REFERENCES documents (id),
        chat_id TEXT NOT NULL,
        PRIMARY KEY (message_id, document_id)
    ) STRICT;
    CREATE INDEX chats_of_documents ON chat_documents (document_id);
    CREATE TABLE readings (
        scope TEXT NOT NULL,
        name TEXT NOT NULL,
        document_id TEXT NOT NULL REFERENCES documents (id),
        PRIMARY KEY (scope, name, document_id)
    ) STRICT;
    CREATE INDEX readings_of_documents ON readings (document_id);
    CREATE TABLE stale_caches (
        number INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        conversation TEXT NOT NULL,
        scope TEXT NOT NULL,
        reading TEXT NOT NULL,
        since_ms INTEGER NOT NULL
    ) STRICT;
    """,
    # 14: records with which another process can continue answers and background responses.
    """
    CREATE TABLE answer_traces (
        message_id TEXT PRIMARY KEY REFERENCES messages (id) ON DELETE CASCADE,
        trace TEXT NOT NULL,
        tries INTEGER NOT NULL,
        resumes INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE open_responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        body TEXT NOT NULL,
        caller TEXT NOT NULL,
        seed INTEGER NOT NULL,
        created_ms INTEGER NOT NULL,
        tries INTEGER NOT NULL DEFAULT 0,
        holder TEXT NOT NULL,
        held_until_ms INTEGER NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE libraries ADD COLUMN instructions TEXT NOT NULL DEFAULT '';
    ALTER TABLE libraries ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE library_members (
        library_id TEXT NOT NULL REFERENCES libraries (id) ON DELETE CASCADE,
        member TEXT NOT NULL,
        name TEXT NOT NULL,
        rights TEXT NOT NULL CHECK (rights IN ('add', 'read')),
        PRIMARY KEY (library_id, member)
    ) STRICT;
    CREATE INDEX libraries_of_members ON library_members (member);
    CREATE VIEW library_readers (library_id, reader, rights) AS
        SELECT id, owner, 'own' FROM libraries UNION ALL SELECT library_id, member, rights FROM library_members;
    ALTER TABLE chats ADD COLUMN project TEXT NOT NULL DEFAULT '';
    CREATE INDEX chats_of_projects ON chats (project) WHERE project <> '';
    CREATE TABLE memories (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        text TEXT NOT NULL,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX memories_of_owners ON memories (owner, created_ms);
    """,
    """
    ALTER TABLE messages ADD COLUMN citations TEXT NOT NULL DEFAULT '[]';
    """,
    # 17: progress of unfinished responses and of streams with X-Conversation-Id, so that both can be continued.
    """
    ALTER TABLE open_responses ADD COLUMN path TEXT NOT NULL DEFAULT '/v1/responses';
    ALTER TABLE open_responses ADD COLUMN headers TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE open_responses ADD COLUMN conversation TEXT NOT NULL DEFAULT '';
    ALTER TABLE open_responses ADD COLUMN progress TEXT NOT NULL DEFAULT '';
    """,
    # 18: tokens of unfinished responses in parts, so that each save stores only the new tokens.
    """
    CREATE TABLE response_tokens (
        response_id TEXT NOT NULL REFERENCES open_responses (id) ON DELETE CASCADE,
        first INTEGER NOT NULL,
        told TEXT NOT NULL,
        PRIMARY KEY (response_id, first)
    ) STRICT, WITHOUT ROWID;
    """,
    # 19: the version of the document reader that produced each text, so that outdated texts can be replaced.
    """
    ALTER TABLE documents ADD COLUMN reader INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX outdated_documents ON documents (created_ms) WHERE held_until_ms < 0;
    """,
)

SCHEMA_VERSION = len(MIGRATIONS)
