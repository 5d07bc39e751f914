"""Documents in API requests and citations in the answers, as the clients of each API see them."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from documents.made import docx, paragraph, pdf, stream, text_operators, text_pdf
from scripted_engine import ScriptedEngine, say

from notso.documents.citations import QUOTE_FIRST
from notso.documents.reading import DocumentReader
from notso.smollm3 import Engine, Event, Message
from notso.web.api.messages.fields import TextBlock
from notso.web.api.messages.request import cited_text
from notso.web.api.shared.given_documents import RequestDocument, RequestDocuments
from notso.web.edge import limits

Start = Callable[..., Any]
HERONS = "Herons stand in the reeds.\nThey eat fish and frogs. Storks nest on chimneys."
PDF = base64.b64encode(text_pdf(["The first page of cranes"], ["The second page of ibises"])).decode()
ANSWER = (
    "[[none]] Look: [[1: They eat fish and frogs]] [[2: second page of ibises]] They eat fish.\n[[3: two three\u00e9]]"
    "Also [[4: six seven]] this, [[9: nothing at all]] and [[5: never quoted here]]."
)


def document(source: dict[str, Any], *, cites: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": {"enabled": cites}, **more}


DOCUMENTS: list[Any] = [
    document({"type": "text", "media_type": "text/plain", "data": HERONS}, title="herons.txt", context="Field notes"),
    document({"type": "base64", "media_type": "application/pdf", "data": PDF}),
    document(
        {"type": "content", "content": [{"type": "text", "text": each} for each in ("one", "two", "three\u00e9")]}
    ),
    {
        "type": "search_result",
        "source": "https://example.org/x",
        "title": "Found",
        "content": [{"type": "text", "text": "five"}, {"type": "text", "text": "six seven eight"}],
        "citations": {"enabled": True},
    },
    document({"type": "text", "media_type": "text/plain", "data": "never quoted here"}, cites=False),
]


def citing(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say(ANSWER, piece=3)


def anthropic_client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)


def ask(*more: dict[str, Any], documents: Sequence[dict[str, Any]] = DOCUMENTS) -> dict[str, Any]:
    first = {"role": "user", "content": [*documents, {"type": "text", "text": "What do they eat?"}]}
    return {"model": "scripted", "max_tokens": 99, "messages": [first, *more]}


def test_anthropic_client_gets_citations_whole_and_streamed(start: Start) -> None:
    engine = ScriptedEngine(citing)
    server = start(engine).ready()
    client = anthropic_client(server)
    message = client.messages.create(**ask())
    prompt = engine.requests[-1]
    (asked,) = prompt.messages
    assert asked.content.startswith(f"--- herons.txt ---\nField notes\n\n{HERONS}\n--- end of herons.txt ---\n")
    assert asked.content.endswith(f"What do they eat?\n\n{QUOTE_FIRST}") and "--- document 3 ---" in asked.content
    assert [bool(each.text) for each in prompt.options.sources] == [True] * 4 + [False]
    blocks = [(block.text, [each.to_dict() for each in block.citations or ()]) for block in message.content]  # type: ignore[union-attr]
    assert [text for text, _ in blocks] == [
        "Look: ",
        "They eat fish.\n",
        "Also ",
        "this, nothing at all and never quoted here.",
    ]
    eaten, second, counted, searched = (each for _, cited in blocks for each in cited)
    place = HERONS.index("They eat fish")
    assert eaten == {
        "type": "char_location",
        "cited_text": "They eat fish and frogs",
        "document_index": 0,
        "document_title": "herons.txt",
        "file_id": None,
        "start_char_index": place,
        "end_char_index": place + len("They eat fish and frogs"),
    }
    assert HERONS[eaten["start_char_index"] : eaten["end_char_index"]] == eaten["cited_text"]
    pages = second["start_page_number"], second["end_page_number"]
    assert (second["type"], second["document_index"], pages) == ("page_location", 1, (2, 3))
    assert (counted["type"], counted["cited_text"], counted["document_index"]) == (
        "content_block_location",
        "two\nthree\u00e9",
        2,
    )
    assert (counted["start_block_index"], counted["end_block_index"]) == (1, 3)
    assert searched == {
        "type": "search_result_location",
        "cited_text": "six seven",
        "search_result_index": 0,
        "source": "https://example.org/x",
        "title": "Found",
        "start_block_index": 1,
        "end_block_index": 2,
    }
    with client.messages.stream(**ask()) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds.count("citation") == 4
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]
    # When the client sends the answer back, the next prompt contains it exactly as it was generated.
    again = client.messages.create(
        **ask({"role": "assistant", "content": message.content}, {"role": "user", "content": "And then?"})
    )
    assert again.content and engine.requests[-1].messages[0].content == asked.content.removesuffix(f"\n\n{QUOTE_FIRST}")
    said = engine.requests[-1].messages[1].content
    assert "[[1: They eat fish and frogs]] [[2: second page of ibises]] They eat fish." in said
    assert "[[3: two three\u00e9]] Also " in said and "[[4: six seven]] this" in said


def test_each_citation_is_resolved_without_reading_all_documents() -> None:
    reads = 0

    class Facts(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal reads
            reads += 1
            return super().get(key, default)

    documents = RequestDocuments()
    for _ in range(50):
        documents.add(RequestDocument("", "", True, facts=Facts(type="document")))
    citations = [{"document_index": at, "cited_text": "x"} for at in range(51)]
    text = cited_text(documents, TextBlock(type="text", text="y", citations=citations))
    assert text.startswith("[[1: x]] [[2: x]] ") and text.endswith(" [[50: x]] y")
    assert reads == 50


def test_disabled_citations_leave_text_unchanged(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("[[1: They eat fish and frogs]] So."))
    server = start(engine).ready()
    client = anthropic_client(server)
    plain = [document({"type": "text", "media_type": "text/plain", "data": HERONS}, cites=False)]
    message = client.messages.create(**ask(documents=plain))
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "[[1: They eat fish and frogs]] So."}
    ]
    assert not engine.requests[-1].options.sources and QUOTE_FIRST not in engine.requests[-1].messages[-1].content
    result = {"type": "tool_result", "tool_use_id": "a", "content": [DOCUMENTS[3]]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "find", "input": {}}]}
    tool = {"name": "find", "input_schema": {"type": "object"}}
    client.messages.create(**ask(called, {"role": "user", "content": [result]}, documents=[]), tools=[tool])
    assert "--- Found ---\nfive\nsix seven eight" in engine.requests[-1].messages[-1].content
    assert engine.requests[-1].options.sources[0].text == "five six seven eight"
    counted = client.messages.count_tokens(model="scripted", messages=ask()["messages"])
    assert counted.input_tokens > 40


@pytest.mark.parametrize(
    "source, said",
    [
        ({"type": "url", "url": "https://example.org/a.pdf"}, "URLs are not fetched"),
        ({"type": "base64", "media_type": "application/pdf", "data": "????"}, "is not base64"),
        (
            {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"%PDF-1.7").decode()},
            "damaged",
        ),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "send a PDF or plain text"),
        ({"type": "content", "content": []}, "source"),
    ],
)
def test_unsupported_document_source_is_rejected(start: Start, source: dict[str, Any], said: str) -> None:
    server = start(ScriptedEngine(citing)).ready()
    with pytest.raises(anthropic.BadRequestError) as refused:
        anthropic_client(server).messages.create(**ask(documents=[document(source)]))
    assert said in str(refused.value) and "messages.0.content.0" in str(refused.value)


def openai_client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def test_openai_client_file_content_is_in_prompt(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("So."))
    server = start(engine).ready()
    client = openai_client(server)
    word = base64.encodebytes(docx([paragraph("The wren sings")])).decode().rstrip("=\n")  # in lines, without padding
    assert "\n" in word
    file = {"filename": "cranes.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    parts: list[Any] = [
        {"type": "file", "file": file},
        {"type": "file", "file": {"filename": "wrens.docx", "file_data": word}},
        {"type": "text", "text": "What is this?"},
    ]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    rendered = server.client.post("/apply-template", json=chat).json()
    assert "--- cranes.pdf ---\nThe first page of cranes" in rendered["prompt"]
    utf16, kind = json.dumps(chat).encode("utf-16"), {"content-type": "application/json"}
    assert server.client.post("/apply-template", content=utf16, headers=kind).json() == rendered
    counted = server.client.post("/v1/chat/completions/input_tokens", json=chat).json()
    assert counted["input_tokens"] == rendered["n_tokens"]
    assert server.client.post("/tokenize", json=chat).json()["count"] >= len(rendered["prompt"].split())
    answer = client.chat.completions.create(model="scripted", **chat)
    assert answer.choices[0].message.content == "So."
    prompt = engine.requests[-1].messages[-1].content
    assert "--- cranes.pdf ---\nThe first page of cranes\n\nThe second page of ibises\n--- end of" in prompt
    assert "--- wrens.docx ---\nThe wren sings" in prompt and prompt.endswith("\nWhat is this?")
    content: list[Any] = [{"type": "input_file", **file}, {"type": "input_text", "text": "What is this?"}]
    first = client.responses.create(model="scripted", input=[{"role": "user", "content": content}])
    assert "The second page of ibises" in engine.requests[-1].messages[-1].content
    kept = client.responses.input_items.list(first.id).data[0]
    client.responses.create(model="scripted", input="And?", previous_response_id=first.id)
    assert "The second page of ibises" in engine.requests[-1].messages[0].content and PDF not in str(kept)


def large_pdf(size: int) -> str:
    return base64.b64encode(pdf([stream(text_operators(["A page of rails"]) + b" " * size)])).decode()


def test_largest_inline_file_is_read_by_every_api(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("So."))
    server = start(engine).ready()
    data = large_pdf(limits.MAX_FILE_BYTES - 4096)
    assert len(data) > limits.MAX_FILE_BYTES * 4 // 3 - 8192
    openai, anthropic = openai_client(server), anthropic_client(server)
    file: Any = {"filename": "rails.pdf", "file_data": f"data:application/pdf;base64,{data}"}
    part: list[Any] = [{"type": "file", "file": file}, {"type": "text", "text": "What is this?"}]
    openai.chat.completions.create(model="scripted", messages=[{"role": "user", "content": part}])
    assert "A page of rails" in engine.requests[-1].messages[-1].content
    item: list[Any] = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    openai.responses.create(model="scripted", input=item)
    assert "A page of rails" in engine.requests[-1].messages[-1].content
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    anthropic.messages.create(**ask(documents=[document(source)]))
    assert "A page of rails" in engine.requests[-1].messages[-1].content


@pytest.mark.parametrize("key", [None, "a key"])
def test_body_does_not_count_while_the_answer_is_generated(
    start: Start, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    budgets: list[limits.BodyBudget] = []

    class NotedBudget(limits.BodyBudget):
        def __init__(self) -> None:
            super().__init__(available=lambda: 1 << 40)
            budgets.append(self)

    monkeypatch.setattr(limits, "BodyBudget", NotedBudget)
    stop = threading.Event()
    engine = ScriptedEngine(lambda messages, thinking: say("So. " * 5000, piece=4), pace_seconds=0.01)
    server = start(engine).ready()
    file = {"filename": "rails.pdf", "file_data": large_pdf(1 << 20)}
    chat = {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}
    headers = {} if key is None else {"Idempotency-Key": key}

    def post() -> None:
        with contextlib.suppress(httpx.TransportError):
            client.post("/v1/chat/completions", json=chat, headers=headers)
        stop.set()

    with httpx.Client(base_url=server.address, timeout=120) as client:
        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        server.wait(lambda: engine.stats().running)
        if key is None:
            server.wait(lambda: budgets[-1].free == limits.MOST_BYTES)
        else:  # the body is still in memory
            assert budgets[-1].free < limits.MOST_BYTES
        assert engine.stats().running and not stop.is_set()
        for each in tuple(server.shared.requests._open):
            server.on_loop(each.stop)
        thread.join(60)


def test_same_content_under_other_names_is_another_file(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So."))).ready()
    data = base64.b64encode(b"<p>wrens &amp; herons</p>").decode()
    files: list[dict[str, str]] = [{"filename": "birds.html"}, {"filename": "birds.txt"}, {}]
    parts = [{"type": "file", "file": {"file_data": data, **each}} for each in files]
    chat = {"messages": [{"role": "user", "content": parts}]}
    prompt = server.client.post("/apply-template", json=chat).json()["prompt"]
    assert "--- birds.html ---\nwrens & herons\n" in prompt and "--- birds.txt ---\n<p>wrens &amp; herons</p>" in prompt
    assert "--- document ---" in prompt


@pytest.mark.parametrize(
    "part, said",
    [
        ({"file_url": "https://example.org/a.pdf"}, "send file_data"),
        ({"filename": "a.pdf", "file_data": "data:application/pdf;base64,????"}, "is not base64"),
        ({"file_id": "file-1", "filename": "a.txt", "file_data": "eA=="}, "file_data and file_id contradict"),
        ({"filename": "a.pdf", "file_data": base64.b64encode(b"%PDF-1.7").decode()}, "is damaged"),
        ({"filename": "a.png", "file_data": base64.b64encode(b"\x89PNG\r\n\x1a\n\0").decode()}, "the file"),
    ],
)
def test_unusable_file_part_is_rejected(start: Start, part: dict[str, Any], said: str) -> None:
    client = openai_client(start(ScriptedEngine(citing)).ready())
    with pytest.raises(openai.BadRequestError, match=said):
        content: list[Any] = [{"type": "input_file", **part}]
        client.responses.create(model="scripted", input=[{"role": "user", "content": content}])
    with pytest.raises(openai.BadRequestError, match=said):
        content = [{"type": "file", "file": part}]
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize("strict", [False, True])
def test_other_fields_of_a_file_part_are_named_as_ignored(start: Start, strict: bool) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So.")), strict_fields=strict).ready()
    file = {"filename": "a.txt", "file_data": base64.b64encode(b"wrens").decode(), "file_url": "", "yyy": None}
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("/v1/responses", "input", {"type": "input_file", **file, "detail": "high"}, "detail"),
        ("/v1/chat/completions", "messages", {"type": "file", "file": {**file, "detail": "high"}}, "file"),
        ("/v1/chat/completions", "messages", {"type": "file", "file": file, "zzz": 1}, "zzz"),
    ]
    for path, name, part, ignored in cases:
        answer = server.client.post(path, json={name: [{"role": "user", "content": [part]}]})
        assert answer.status_code == (400 if strict else 200)
        named = answer.json()["error"]["param"] if strict else answer.headers["x-notso-ignored"]
        assert named.split(".")[-1] == ignored, "a field without a value is not named"


@pytest.mark.parametrize("others", [{}, {"file_id": "file-1"}])
def test_error_names_the_address_of_a_file(start: Start, others: dict[str, str]) -> None:
    client = start(ScriptedEngine()).ready().client
    file = {"file_url": "https://example.org/a.pdf", **others}
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("/v1/responses", "input", {"type": "input_file", **file}, "input.0.content.0.file_url"),
        ("/v1/chat/completions", "messages", {"type": "file", "file": file}, "messages.0.content.0.file.file_url"),
    ]
    for path, name, part, param in cases:
        answer = client.post(path, json={name: [{"role": "user", "content": [part]}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")


def test_stored_files_are_referenced_by_id(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("[[1: second page of ibises]] So."))
    server = start(engine).ready()
    client, other = openai_client(server), anthropic_client(server)
    content = base64.b64decode(PDF)
    stored = client.files.create(file=("cranes.pdf", content), purpose="user_data")
    assert (stored.purpose, stored.bytes, client.files.content(stored.id).read()) == (
        "user_data",
        len(content),
        content,
    )
    parts: list[Any] = [{"type": "file", "file": {"file_id": stored.id}}, {"type": "text", "text": "What is this?"}]
    client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": parts}])
    prompt = engine.requests[-1].messages[-1].content
    assert "--- cranes.pdf ---\nThe first page of cranes" in prompt
    given: list[Any] = [{"type": "input_file", "file_id": stored.id, "file_data": ""}]
    client.responses.create(model="scripted", input=[{"role": "user", "content": given}])
    assert "The second page of ibises" in engine.requests[-1].messages[-1].content
    uploaded = other.beta.files.upload(file=("ibises.pdf", content, "application/pdf"))
    assert (uploaded.filename, uploaded.mime_type, uploaded.size_bytes) == (
        "ibises.pdf",
        "application/pdf",
        len(content),
    )
    assert {each.id for each in other.beta.files.list()} == {stored.id, uploaded.id}
    assert other.beta.files.retrieve_metadata(uploaded.id) == uploaded
    message = other.messages.create(**ask(documents=[document({"type": "file", "file_id": uploaded.id})]))
    (cited,) = message.content[0].citations  # type: ignore[union-attr]
    assert (cited.type, cited.file_id, cited.document_title) == ("page_location", uploaded.id, "ibises.pdf")
    assert other.beta.files.delete(uploaded.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError, match="no file with that id"):
        other.messages.create(**ask(documents=[document({"type": "file", "file_id": uploaded.id})]))
    with pytest.raises(openai.BadRequestError, match="purpose must be batch, user_data or assistants"):
        client.files.create(file=("a.png", b"x"), purpose="vision")


def test_x_quote_of_limits_fields_to_quotes_of_file_or_prompt(start: Start) -> None:
    server = start(lambda: Engine.load(threads=1)).ready()
    quoting = {"type": "string", "x-quote-of": "cranes.pdf", "maxLength": 30}
    asked = {"type": "string", "x-quote-of": "prompt"}
    schema = {"type": "object", "properties": {"a": quoting, "b": asked}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    file = {"filename": "cranes.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    content: list[Any] = [{"type": "file", "file": file}, {"type": "text", "text": "Which birds are meant?"}]
    answer = openai_client(server).chat.completions.with_raw_response.create(
        model="notso-demo",
        messages=[{"role": "user", "content": content}],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        extra_body={"enable_thinking": False},
    )
    found = json.loads(answer.parse().choices[0].message.content or "")
    text = "The first page of cranes\n\nThe second page of ibises"
    assert found["a"] and found["a"] in text and len(found["a"]) <= 30
    assert (
        found["b"] and found["b"] in f"--- cranes.pdf ---\n{text}\n--- end of cranes.pdf ---\n\nWhich birds are meant?"
    )
    assert "x-quote-of" not in answer.headers.get("x-notso-ignored", "")
    titled = document({"type": "text", "media_type": "text/plain", "data": HERONS}, cites=False, title="herons")
    schema["properties"] = {"a": {"type": "string", "x-quote-of": "herons"}}
    schema["required"] = ["a"]
    config = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = anthropic_client(server).messages.create(
        **ask(documents=[titled]) | {"model": "notso-demo", "max_tokens": 400}, extra_body=config
    )
    assert json.loads(message.content[0].text)["a"] in HERONS  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match="does not name a document; available: document 1"):
        unnamed = document({"type": "text", "media_type": "text/plain", "data": HERONS}, cites=False)
        anthropic_client(server).messages.create(
            **ask(documents=[unnamed]) | {"model": "notso-demo"}, extra_body=config
        )


def test_documents_of_one_client_are_read_one_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that name stored files are small, so that many could wait with large files in memory."""
    server = start(ScriptedEngine()).ready()
    running, most, loaded, gate = list[DocumentReader](), list[int](), list[str](), threading.Event()
    read, load = DocumentReader.read, server.shared.store.records.content

    def held(reader: DocumentReader) -> Any:
        running.append(reader)
        most.append(len(running))
        gate.wait(60)
        running.remove(reader)
        return read(reader)

    def counted(owner: str, file_id: str) -> Any:
        loaded.append(file_id)
        return load(owner, file_id)

    monkeypatch.setattr(DocumentReader, "read", held)
    monkeypatch.setattr(server.shared.store.records, "content", counted)
    stored = openai_client(server).files.create(file=("a.txt", b"Herons"), purpose="user_data")
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": stored.id}}]}],
    }
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(server.client.post, "/v1/chat/completions", json=body) for _ in range(3)]
        try:
            server.wait(lambda: len(running) == 3 or (len(running) == 1 and server.shared.documents.waiting == 2))
            assert len(loaded) == 1
        finally:
            gate.set()
    assert [each.result().status_code for each in answers] == [200] * 3 and max(most) == 1
