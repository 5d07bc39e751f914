"""Numbers in the documentation agree with constants: sentences built from constants must occur in their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from notso.smollm3.engine.memory_plan import DEFAULT_CONTEXT_TOKENS, DEFAULT_SEQUENCES, K8V8_UP_TO_TOKENS
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS
from notso.web import app, server
from notso.web.chat.files import imports
from notso.web.chat.services import MOST_WAITING_IMPORTS
from notso.web.edge import connections, limits, work_queue
from notso.web.store.postgres import store
from notso.web.tools import mcp_config, mcp_process, mcp_servers, toolbox
from notso.web.turns import documents, tool_calls
from notso.web.values.settings import DEFAULT_PORT, Settings

ROOT = Path(__file__).parents[2]
POSTGRES_CONNECTIONS = store.WRITE_THREADS + store.READ_THREADS + store.LEASE_THREADS + store.ACCESS_THREADS
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MIB, KIB = 1 << 20, 1 << 10
OPERATIONS, CHAT, README, HOUSE = "docs/operations.md", "docs/chat.md", "README.md", "ARCHITECTURE.md"


def said(count: float) -> str:
    return WORDS[int(count)]


SENTENCES = [
    (OPERATIONS, f"{connections.MAX_CONNECTIONS:,} connections at once"),
    (OPERATIONS, f"does not read for {Settings().send_timeout_seconds:.0f} s is disconnected"),
    (OPERATIONS, f"are logged {server.MOST_PER_WINDOW} times a minute for each kind"),
    (OPERATIONS, f"with a prompt may have up to {limits.MAX_REQUEST_BYTES // MIB} MiB, which"),
    (OPERATIONS, f"a file of {limits.MAX_FILE_BYTES // MIB} MiB in Base64"),
    (OPERATIONS, f"requests {limits.MAX_BODY_BYTES // MIB} MiB."),
    (OPERATIONS, f"All request bodies together may use {limits.MOST_BYTES // MIB} MiB"),
    (OPERATIONS, f"the first {limits.FREE_BYTES // KIB} KiB of each"),
    (OPERATIONS, f"a body waits for up to {limits.FAIR_SECONDS:.0f} s"),
    (OPERATIONS, f"get 503 with `Retry-After: {limits.RETRY_SECONDS}`"),
    (OPERATIONS, f"of more than {work_queue.LARGE_BYTES // KIB} KiB are processed one at a time"),
    (OPERATIONS, f"with {work_queue.MOST_WAITING} others waiting (imports: {MOST_WAITING_IMPORTS}) they"),
    (OPERATIONS, f"get 429 with `Retry-After: {work_queue.RETRY_SECONDS}`"),
    (OPERATIONS, f"up to {POSTGRES_CONNECTIONS} for each server, so that {97 // POSTGRES_CONNECTIONS} servers fit"),
    (OPERATIONS, f"up to {limits.LARGER_BODIES['/import'] // MIB} MiB, {imports.MAX_CHATS:,} chats,"),
    (OPERATIONS, f"chats, {imports.MAX_MESSAGES:,} messages,"),
    (OPERATIONS, f"can be restored for {app.UNDO_SECONDS:.0f} seconds. Within {app.PURGE_SECONDS:.0f} more"),
    (OPERATIONS, f"port {DEFAULT_PORT} with `/v1`, or on"),
    (CHAT, f"at most {said(documents.MAX_ATTACHMENTS)} files, with"),
    (CHAT, f"{Settings().max_message_characters:,} characters in total"),
    (CHAT, f"at most {toolbox.MAX_RESULT_CHARACTERS:,} characters of it"),
    (CHAT, f"A response can contain up to {said(tool_calls.MAX_ROUNDS)} rounds"),
    (CHAT, f"retried by the first call after {said(mcp_servers.RESTART_SECONDS)} seconds"),
    (CHAT, f"more than {mcp_process.MAX_MESSAGE_BYTES // MIB} MiB or {mcp_process.MAX_MESSAGE_ITEMS:,} parts"),
    (CHAT, f"reads nothing for {said(mcp_process.WRITE_SECONDS)} seconds"),
    (CHAT, f"At most {said(mcp_config.MAX_SERVERS)} servers and {mcp_servers.MAX_TOOLS} tools"),
    (CHAT, f"at most {mcp_servers.MAX_SCHEMA_CHARACTERS:,} characters, nested {mcp_servers.MAX_SCHEMA_DEPTH} deep"),
    (README, f"opens the chat at http://127.0.0.1:{DEFAULT_PORT}"),
    (README, f"The default context is {DEFAULT_CONTEXT_TOKENS:,} tokens"),
    (README, f"beyond {K8V8_UP_TO_TOKENS:,} tokens,"),
    (README, f"Up to {DEFAULT_SEQUENCES} responses are generated concurrently"),
    (README, f"Another {Settings().max_waiting_turns} requests may be queued"),
    (HOUSE, f"429 when {Settings().max_waiting_turns} requests are already waiting"),
    (HOUSE, f"blocks of {BLOCK_TOKENS} positions"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "sentence"), SENTENCES)
def test_documents_state_the_values_of_constants(document: str, sentence: str) -> None:
    assert sentence in " ".join((ROOT / document).read_text("utf-8").split())
