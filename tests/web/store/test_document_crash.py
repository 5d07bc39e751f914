"""kill -9 while documents are added, parsed and deleted: none is half stored, and no acknowledged one is lost."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from web.store.some_chats import OWNER, run_with_store
from web.store.test_documents import parsed

from notso.web.store.sqlite.store import SQLiteStore

WORKER = """
import asyncio, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from web.store.test_documents import parsed
from web.store.some_chats import OWNER
from notso.web.store.sqlite.store import SQLiteStore

async def work(rng):
    store = SQLiteStore(Path(sys.argv[1]))
    await store.open()
    await store.documents.requeue()
    library = await store.documents.library(OWNER, "Documents")
    ready = []
    for number in range(1000):
        text = f"document {rng.random()} " + "heron stork crane " * rng.randrange(400)
        document = await store.documents.add(OWNER, library.id, "a.txt", text.encode())
        print("added", document.id, document.sha256, flush=True)
        taken = await store.documents.claim(1)
        await store.documents.finish(taken[0].id, parsed(taken[1].decode(), "second page"))
        print("ready", taken[0].id, "", flush=True)
        ready.append(taken[0].id)
        if rng.random() < 0.4:
            gone = ready.pop(rng.randrange(len(ready)))
            await store.documents.delete(OWNER, gone)
            print("deleted", gone, "", flush=True)

asyncio.run(work(random.Random(sys.argv[2])))
"""
TABLES = ("document_parts", "document_texts")


def killed(folder: Path, seed: int, lines: int) -> list[list[str]]:
    """Run the worker until it has printed `lines` lines, kill it, and return everything it acknowledged."""
    command = [sys.executable, "-c", WORKER, str(folder), str(seed), str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        said = [worker.stdout.readline().rstrip("\n").split(" ") for _ in range(lines)]
        worker.send_signal(signal.SIGKILL)
        return [*said, *(line.split(" ") for line in worker.stdout.read().splitlines(keepends=False))]


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=[pytest.mark.long("store"), pytest.mark.timeout(3600)])])
def test_documents_survive_kills(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    kept: dict[str, str] = {}
    ready: set[str] = set()
    for kill in range(kills):
        for what, document_id, digest in killed(tmp_path, kill, rng.randrange(1, 12)):
            if what == "added":
                kept[document_id] = digest
            elif what == "ready":
                ready.add(document_id)
            else:
                del kept[document_id]
        run_with_store(SQLiteStore(tmp_path), lambda store: _check(store, kept, ready))


async def _check(store: Any, kept: dict[str, str], ready: set[str]) -> None:
    there = {each.id: each for each in await store.documents.documents(OWNER)}
    # The last deletion may have been done without an acknowledgment.
    missing = kept.keys() - there.keys()
    assert len(missing) <= 1
    for each in missing:
        del kept[each]
    unacknowledged = there.keys() - kept.keys()
    assert len(unacknowledged) <= 1
    kept |= {each: there[each].sha256 for each in unacknowledged}
    for document in there.values():
        content = await store.documents.content(OWNER, document.id)
        assert hashlib.sha256(content).hexdigest() == document.sha256 == kept[document.id]
        text = await store.documents.text(OWNER, document.id)
        assert document.state != "ready" or (
            text is not None and text.text == parsed(content.decode(), "second page").text
        )
        assert document.state == "ready" or (document.id not in ready and text is None)
    hits = await store.documents.search(OWNER, "second page", 50)
    assert len(hits) >= min(50, sum(each.state == "ready" for each in there.values()))

    def rows(db: Any) -> None:
        ids, numbers = "SELECT id FROM documents", "SELECT number FROM documents WHERE state = 'ready'"
        for table in TABLES:
            assert db.execute(f"SELECT 1 FROM {table} WHERE document_id NOT IN ({ids})").fetchone() is None
        assert db.execute(f"SELECT 1 FROM document_words WHERE document NOT IN ({numbers})").fetchone() is None

    await store.run_read(rows)
