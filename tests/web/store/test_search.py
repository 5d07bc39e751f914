"""Search gives the same results in both databases: in any script, with diacritics, and for misspelled words."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.store.conftest import Kept
from web.store.some_chats import OWNER, a_chat, run_with_store

from notso.web.store.protocol import Chat, ChatStore, StoredMessage
from notso.web.store.sql.search_words import extract_snippet, parse_query, similar_terms, split_words
from notso.web.store.sqlite import connection
from notso.web.store.sqlite.migrations import MIGRATIONS
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.ids import new_id

TEXTS = [
    "日本語を勉強しています。",
    "排序算法和搜索算法",
    "한국어를 배우고 있습니다",
    "Use C++ or C#, not C, for foo-bar and F#.",
    "Deploy it on Kubernetes with a certificate.",
    "Übung macht den Meister, naïve Café",
    "مرحبا بالعالم",
    "x = a+b; i++ ; c++x",
    "iPhone手机 und 5G",
]
QUERIES = [
    *("勉強", "日本", "語", "本語を勉", "算法", "排序搜索", "索算", "배우", "한국어를", "국어", "手机", "iphone"),
    *("c++", "C++", "c#", "f#", "c", "foo-bar", "bar", "a b", "i++", "kubernets", "certifcate", "kubernetes cert"),
    *("ubung", "cafe", "مرحبا", "meister ubung", "5g", "nothing here", "+", "日本c", "deploy kubernets"),
]


def chats() -> list[tuple[Chat, list[StoredMessage]]]:
    made = []
    for at, text in enumerate(TEXTS):
        chat = replace(a_chat(f"Chat {at}"), created_ms=1000 + at, updated_ms=1000 + at)
        made.append((chat, [StoredMessage(new_id(), chat.id, "user", text, "", "done", 5000 + at)]))
    return made


def found(kept: Kept) -> dict[str, list[tuple[str, str, int, bool]]]:
    result: dict[str, Any] = {}

    async def work(store: ChatStore) -> None:
        await store.add_chats(OWNER, chats())
        other = a_chat("Kubernetes")
        await store.add_chat("another", other, [])
        for query in QUERIES:
            hits = await store.search(OWNER, query, 50)
            result[query] = [(hit.title, hit.snippet, hit.at_ms, hit.similar) for hit in hits]

    kept.run(work)
    return result


def mark(text: str, *words: str) -> str:
    for word in words:
        text = text.replace(word, f"\x02{word}\x03", 1)
    return text


def test_words_of_every_script_are_found(kept: Kept) -> None:
    hits = found(kept)
    expected = {
        "勉強": [mark(TEXTS[0], "勉強")],
        "語": [mark(TEXTS[0], "語")],
        "本語を勉": [mark(TEXTS[0], "本語を勉")],
        "索算": [mark(TEXTS[1], "索算")],
        "算法": [TEXTS[1].replace("算法", "\x02算法\x03")],
        "국어": [mark(TEXTS[2], "국어")],
        "手机": [mark(TEXTS[8], "手机")],
        "c++": [mark(TEXTS[3], "C++")],
        "f#": [mark(TEXTS[3], "F#")],
        "foo-bar": [mark(TEXTS[3], "foo", "bar")],
        "ubung": [mark(TEXTS[5], "Übung")],
        "مرحبا": [mark(TEXTS[6], "مرحبا")],
        "kubernets": [mark(TEXTS[4], "Kubernetes")],
        "certifcate": [mark(TEXTS[4], "certificate")],
        "nothing here": [],
        "+": [],
    }
    for query, snippets in expected.items():
        assert [snippet for _, snippet, _, _ in hits[query]] == snippets, query
    assert [similar for *_, similar in hits["kubernets"]] == [True]
    assert not any(similar for *_, similar in hits["c++"] + hits["勉強"])
    times = [at for _, _, at, _ in hits["c"]]
    titles = [at for at in times if at < 5000]
    assert times == titles + sorted(times[len(titles) :], reverse=True), "titles first, then the newest messages"


def test_words_of_other_users_do_not_affect_similar_words(kept: Kept) -> None:
    decoys = "kubernetse kubernetsa kubernetso kubernetsy kubernetsi"  # more similar than "kubernetes"

    async def work(store: ChatStore) -> None:
        await store.add_chats(OWNER, chats())
        for title in ("a title", decoys):
            await store.add_chat("another", a_chat(title), [])
            assert [hit.title for hit in await store.search(OWNER, "kubernetsu", 50)] == ["Chat 4"]
        assert [hit.title for hit in await store.search("another", "kubernetsu", 50)] == [decoys]
        assert not await store.search("another", "certifcate", 50)

    kept.run(work)


def test_search_results_are_equal_in_both_databases(tmp_path: Path, database: str) -> None:
    from notso.web.store.postgres.store import PostgresStore

    made = chats()
    results = []
    for store in (SQLiteStore(tmp_path), PostgresStore(database)):
        hits: dict[str, Any] = {}

        async def work(store: ChatStore, hits: dict[str, Any] = hits) -> None:
            await store.add_chats(OWNER, made)
            for query in QUERIES:
                hits[query] = await store.search(OWNER, query, 50)

        run_with_store(store, work)
        results.append(hits)
    assert results[0] == results[1] and sum(map(len, results[0].values())) > 25


def test_sqlite_migration_rebuilds_the_search_index(tmp_path: Path) -> None:
    path = tmp_path / "notso.db"
    old = sqlite3.connect(path, isolation_level=None)
    for script in MIGRATIONS[:10]:
        old.executescript(script)
    old.execute("PRAGMA user_version=10")
    old.execute(
        "INSERT INTO chats (id, owner, title, thinking, prompt_date, created_ms, updated_ms)"
        " VALUES ('c', ?, 'Walross', 1, '2025-07-08', 1, 1)",
        (OWNER,),
    )
    old.execute(
        "INSERT INTO messages (id, owner, chat_id, position, role, content, state, created_ms)"
        " VALUES ('m', ?, 'c', 1, 'user', '日本語を勉強', 'done', 1)",
        (OWNER,),
    )
    old.execute("INSERT INTO indexed (owner, chat_id) VALUES (?, 'c')", (OWNER,))
    old.execute("INSERT INTO indexed (owner, chat_id, message_id) VALUES (?, 'c', 'm')", (OWNER,))
    old.close()

    async def work(store: ChatStore) -> None:
        assert [hit.message_id for hit in await store.search(OWNER, "勉強", 9)] == ["m"]
        assert [hit.message_id for hit in await store.search(OWNER, "walross", 9)] == [None]

    run_with_store(SQLiteStore(tmp_path), work)
    assert connection.open_empty().execute("SELECT count(*) FROM texts").fetchone()[0] == 0


def test_postgres_migration_rebuilds_the_search_index(new_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    psycopg = pytest.importorskip("psycopg")
    from notso.web.store.postgres import connection as postgres

    with psycopg.connect(new_database, autocommit=True) as db:
        monkeypatch.setattr(postgres, "SCHEMA_VERSION", min(postgres.REINDEXES) - 1)
        postgres.migrate(db)
        db.execute(
            "INSERT INTO notso.chats (id, owner, title, thinking, prompt_date, created_ms, updated_ms)"
            " VALUES ('c', %s, '日本語', true, '2025-07-08', 1, 1)",
            (OWNER,),
        )
        db.execute("INSERT INTO notso.indexed (owner, chat_id, words) VALUES (%s, 'c', '')", (OWNER,))
        monkeypatch.undo()
        postgres.migrate(db)
        assert db.execute("SELECT words::text FROM notso.indexed").fetchone()[0] == "'日本':1 '本語':2 '語':3"


def test_snippets_are_short_and_marked() -> None:
    dice = random.Random(3)
    words = ["alpha", "Übung", "日本語", "c++", "x", "<b>", "\n", "🙂", "--"]
    for _ in range(300):
        text = " ".join(dice.choices(words, k=dice.randint(1, 200)))
        query = " ".join(dice.choices(["alpha", "ubung", "本語", "c++", "nothing"], k=dice.randint(1, 3)))
        snippet = extract_snippet(text, query, parse_query(query))
        plain = snippet.replace("\x02", "").replace("\x03", "").strip("…")
        assert plain in text and len(plain) <= 240
        assert snippet.count("\x02") == snippet.count("\x03")
        wanted = {word for term in parse_query(query) for word in term.words}
        assert ("\x02" in snippet) == bool(wanted & set(split_words(text)))


@pytest.mark.parametrize(("word", "other"), [("kubernets", "kubernetes"), ("certifcate", "certificate")])
def test_misspelled_words_match_similar_words(word: str, other: str) -> None:
    terms = similar_terms(parse_query(f"the {word}"), ["the", "zebra", other, "kitchen"])
    assert terms is not None and [term.words for term in terms] == [("the",), (other,)]
    assert similar_terms(parse_query("qqqqqq"), ["zebra"]) is None
    assert similar_terms(parse_query("c++"), ["c+++"]) is None, "the word is too short for a similarity search"
