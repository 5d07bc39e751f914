"""Vector stores and file_search, through OpenAI's client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
from documents.made import text_pdf
from scripted_engine import ScriptedEngine, say

from notso.documents.citations import QUOTE_FIRST
from notso.smollm3 import Event, Message
from notso.web.api.batches import vector_stores
from notso.web.api.shared import vector_search
from notso.web.store.sql import documents

Start = Callable[..., Any]
STORKS = "Storks nest on the chimneys of old houses."
HERONS = "Herons stand in the reeds and eat fish."


def citing(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say("[[1: nest on the chimneys of old houses]] They like [[1: pink palaces]] houses.", piece=5)


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def uploaded(client: openai.OpenAI, name: str, content: bytes) -> str:
    return client.files.create(file=(name, content), purpose="assistants").id


def filled(client: openai.OpenAI) -> tuple[str, str, str]:
    """Create a store with two files; return its id and their ids."""
    storks = uploaded(client, "storks.pdf", text_pdf(["A title page"], [STORKS]))
    herons = uploaded(client, "herons.txt", HERONS.encode())
    store = client.vector_stores.create(name="Birds", file_ids=[storks])
    added = client.vector_stores.files.create_and_poll(herons, vector_store_id=store.id, poll_interval_ms=50)
    assert (added.id, added.status, added.last_error) == (herons, "completed", None)
    assert client.vector_stores.files.poll(storks, vector_store_id=store.id, poll_interval_ms=50).status == "completed"
    return store.id, storks, herons


def test_file_ids_are_not_computed_on_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine(citing)).ready()
    client = client_of(server)
    store, storks, herons = filled(client)
    threads, compute = set[int](), vector_search.document_id_of

    def noted(file_id: str, library_id: str) -> str:
        threads.add(threading.get_ident())
        return compute(file_id, library_id)

    monkeypatch.setattr(vector_search, "document_id_of", noted)
    assert {each.id for each in client.vector_stores.files.list(store)} == {storks, herons}
    assert threads and server.on_loop(threading.get_ident) not in threads


def test_vector_store_is_filled_searched_renamed_and_deleted(start: Start) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    store, storks, herons = filled(client)
    shown = client.vector_stores.retrieve(store)
    assert (shown.name, shown.status, shown.file_counts.completed, shown.file_counts.total) == (
        "Birds",
        "completed",
        2,
        2,
    )
    assert shown.usage_bytes > len(HERONS)
    assert [each.id for each in client.vector_stores.files.list(store, order="asc")] == [storks, herons]
    assert [each.id for each in client.vector_stores.files.list(store, before=storks).data] == [herons]
    assert [each.id for each in client.vector_stores.files.list(store, filter="failed")] == []
    (hit,) = client.vector_stores.search(store, query="Who nests on chimneys?")
    assert (hit.file_id, hit.filename, hit.content[0].text) == (storks, "storks.pdf", STORKS) and 0 < hit.score < 1
    assert not list(client.vector_stores.search(store, query="walrus"))
    several = client.vector_stores.search(store, query=["chimneys", "fish"], max_num_results=1)
    assert len(list(several)) == 1
    for query in ("long " * 1_000, ["chimneys"] * 17):
        with pytest.raises(openai.BadRequestError, match="query"):
            client.vector_stores.search(store, query=query)
    none = client.vector_stores.search(store, query="chimneys", ranking_options={"score_threshold": 0.99})
    assert not list(none)
    (text,) = client.vector_stores.files.content(herons, vector_store_id=store)
    assert text.text == HERONS
    assert client.vector_stores.update(store, name="Fowl").name == "Fowl"
    again = client.vector_stores.create(name="Fowl")
    assert again.name == "Fowl (2)" and [each.id for each in client.vector_stores.list()] == [again.id, store]
    twin = uploaded(client, "copy.txt", HERONS.encode())
    assert client.vector_stores.files.create(store, file_id=twin).status == "completed", "the content is known already"
    assert client.vector_stores.files.retrieve(twin, vector_store_id=store).status == "completed"
    assert client.vector_stores.files.delete(herons, vector_store_id=store).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.retrieve(herons, vector_store_id=store)
    assert client.files.retrieve(herons).id == herons, "the uploaded file stays"
    client.files.delete(storks)
    (left,) = client.vector_stores.files.list(store)
    assert left.id != storks and client.vector_stores.files.retrieve(left.id, vector_store_id=store).id == left.id
    assert client.vector_stores.delete(store).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(store)


def test_number_of_vector_stores_is_limited_whatever_their_names(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine(citing)).ready()
    for number in range(1, 101):
        name = "Vector store" if number == 1 else f"Vector store ({number})"
        server.on_loop(lambda name=name: server.shared.store.documents.new_library("local", name))
    client = client_of(server)
    assert client.vector_stores.create().name == "Vector store (101)"
    client.vector_stores.delete(client.vector_stores.create(name="Other").id)
    for module in (vector_stores, documents):
        monkeypatch.setattr(module, "MAX_LIBRARIES_OF_OWNER", 101)
    for name in ("Vector store", "Other"):
        with pytest.raises(openai.RateLimitError, match="already 101 vector stores"):
            client.vector_stores.create(name=name)
    client.vector_stores.delete(client.vector_stores.list().data[0].id)
    assert client.vector_stores.create().name == "Vector store (101)"


def test_no_vector_store_remains_if_its_files_do_not_fit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    file_ids = [uploaded(client, f"{text}.txt", text.encode()) for text in ("one", "two")]
    monkeypatch.setattr(documents, "MAX_DOCUMENTS_OF_OWNER", 1)
    with pytest.raises(openai.InternalServerError, match="documents"):
        client.vector_stores.create(file_ids=file_ids)
    assert client.vector_stores.list().data == []
    assert client.vector_stores.create(file_ids=file_ids[:1]).file_counts.total == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"file_ids": ["file-none"]}, "no file with that id"),
        ({"expires_after": {"anchor": "last_active_at", "days": 1}}, "expires_after"),
        ({"name": 3}, "name"),
    ],
)
def test_invalid_vector_store_is_rejected_and_not_created(start: Start, given: dict[str, Any], said: str) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    with pytest.raises(openai.APIStatusError, match=said):
        client.vector_stores.create(**given)
    assert not list(client.vector_stores.list()), "nothing may remain in the store list"


def test_taken_names_are_numbered_and_refused_when_renaming(start: Start) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    assert [client.vector_stores.create(name="Birds").name for _ in range(2)] == ["Birds", "Birds (2)"]
    other = client.vector_stores.create(name="Fish").id
    with pytest.raises(openai.ConflictError, match="already exists"):
        client.vector_stores.update(other, name="Birds")
    for name in ("", " \n"):
        assert client.vector_stores.update(other, name=name).name == "Fish"


def test_unreadable_file_fails_with_error(start: Start) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    store = client.vector_stores.create(metadata={"a": "b"})
    broken = uploaded(client, "broken.pdf", b"%PDF-1.7")
    found = client.vector_stores.files.create_and_poll(broken, vector_store_id=store.id, poll_interval_ms=50)
    assert found.status == "failed" and found.last_error is not None and "damaged" in found.last_error.message
    raw = client.vector_stores.with_raw_response.create(metadata={"a": "b"})
    assert raw.headers["x-notso-ignored"] == "metadata"
    raw = client.vector_stores.with_raw_response.create(chunking_strategy={"type": "auto"})
    assert "x-notso-ignored" not in raw.headers
    unknown: Any = {"type": "auto", "zzz": 1}
    raw = client.vector_stores.with_raw_response.create(chunking_strategy=unknown)
    assert raw.headers["x-notso-ignored"] == "chunking_strategy.zzz"
    batch = client.files.create(file=("b.jsonl", b"{}"), purpose="batch").id
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.vector_stores.files.create(store.id, file_id=batch)


def test_file_search_answer_cites_files(start: Start) -> None:
    engine = ScriptedEngine(citing)
    client = client_of(start(engine).ready())
    store, storks, _ = filled(client)
    tool: Any = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 4}
    asked: dict[str, Any] = {"model": "scripted", "input": "Where do storks nest?", "tools": [tool]}
    answer = client.responses.create(**asked, include=["file_search_call.results"])
    (prompt,) = engine.requests[-1].messages
    assert prompt.content == (
        "Passages of the document that mention words of the question:\n\n"
        f"--- storks.pdf ---\n{STORKS}\n--- end of storks.pdf ---\n\nWhere do storks nest?\n\n{QUOTE_FIRST}"
    )
    assert [each.text for each in engine.requests[-1].options.sources] == [STORKS]
    search, message = answer.output
    assert search.type == "file_search_call" and search.queries == ["Where do storks nest?"]
    assert search.results is not None and search.results[0].file_id == storks and search.results[0].text == STORKS
    assert answer.output_text == "They like pink palaces houses."
    (cited,) = message.content[0].annotations  # type: ignore[union-attr, index]
    assert cited.to_dict() == {"type": "file_citation", "index": 0, "file_id": storks, "filename": "storks.pdf"}
    for choice in ("required", {"type": "file_search"}):
        client.responses.create(**asked, tool_choice=choice)
        assert engine.requests[-1].options.tool_choice == "auto"
    assert client.responses.create(**asked, tool_choice="none").output[0].type == "message"
    limited = client.responses.with_raw_response.create(**asked, max_tool_calls=1)
    assert "x-notso-ignored" not in limited.headers and limited.parse().to_dict()["max_tool_calls"] == 1
    assert [each.type for each in limited.parse().output] == ["file_search_call", "message"]
    events = list(client.responses.create(**asked, stream=True))
    kinds = [each.type for each in events]
    steps = [f"response.file_search_call.{step}" for step in ("in_progress", "searching", "completed")]
    assert [each for each in kinds if "file_search" in each] == steps
    assert kinds.index(steps[-1]) < kinds.index("response.output_text.annotation.added")
    last = events[-1].response  # type: ignore[union-attr]
    assert last.output_text == answer.output_text and last.output[0].results is None  # type: ignore[union-attr]
    deltas = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert deltas == answer.output_text


def test_next_response_omits_earlier_passages(start: Start) -> None:
    engine = ScriptedEngine(citing)
    client = client_of(start(engine).ready())
    store, _, _ = filled(client)
    tool: Any = {"type": "file_search", "vector_store_ids": [store]}
    first = client.responses.create(model="scripted", input="Where do storks nest?", tools=[tool])
    client.responses.create(model="scripted", input="Why walruses?", tools=[tool], previous_response_id=first.id)
    asked, said, now = engine.requests[-1].messages
    assert (asked.content, said.content) == ("Where do storks nest?", first.output_text)
    assert now.content == "Nothing in the documents mentions the words of this question.\n\nWhy walruses?"
    given = [{"role": "user", "content": "Where?"}, *(each.to_dict() for each in first.output)]
    client.responses.create(model="scripted", input=[*given, {"role": "user", "content": "Why?"}])  # type: ignore[list-item]
    assert [each.role for each in engine.requests[-1].messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"vector_store_ids": ["vs_none"]}], "no vector store with that id"),
        ([{"vector_store_ids": []}], "vector_store_ids"),
        ([{"vector_store_ids": ["a"], "filters": {"type": "eq", "key": "a", "value": "b"}}], "filters"),
        ([{"vector_store_ids": ["a"]}, {"vector_store_ids": ["b"]}], "more than one file_search"),
    ],
)
def test_invalid_file_search_is_rejected(start: Start, tools: list[dict[str, Any]], said: str) -> None:
    client = client_of(start(ScriptedEngine(citing)).ready())
    given: Any = [{"type": "file_search", **each} for each in tools]
    with pytest.raises(openai.APIStatusError, match=said):
        client.responses.create(model="scripted", input="Where?", tools=given)
