"""Documents through the vendors' clients with their defaults: citations refer to the right places."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from documents.made import text_pdf

HERONS = "Grey herons wait é in the reeds until a fish comes by.\nThen they strike 🐟 quickly, and swallow it whole."
STORKS = "White storks nest on the chimneys of old houses, and come back every spring to the same nest."
PDF = text_pdf(["A page before the one that is quoted"], [STORKS])
WORDS = 6
"""Number of words that the scripted server quotes of each document, starting at the third."""


def of_openai(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none")


def of_anthropic(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none")


def quoted_of(text: str) -> str:
    return " ".join(text.replace("\n", " ").split(" ")[2 : 2 + WORDS])


def blocks() -> list[Any]:
    def document(source: dict[str, Any], title: str) -> dict[str, Any]:
        return {"type": "document", "source": source, "title": title, "citations": {"enabled": True}}

    pdf = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(PDF).decode()}
    parts = [{"type": "text", "text": each} for each in HERONS.split("\n")]
    return [
        document({"type": "text", "media_type": "text/plain", "data": HERONS}, "herons"),
        document(pdf, "storks"),
        document({"type": "content", "content": parts}, "parts"),
        {
            "type": "search_result",
            "source": "https://example.org/herons",
            "title": "found",
            "content": parts,
            "citations": {"enabled": True},
        },
    ]


def check_citations(message: Any) -> None:
    cited = [each for block in message.content if block.type == "text" for each in block.citations or ()]
    herons, storks, parts, found = cited
    assert herons.type == "char_location" and herons.document_title == "herons"
    assert HERONS[herons.start_char_index : herons.end_char_index] == herons.cited_text == quoted_of(HERONS)
    pages = storks.start_page_number, storks.end_page_number
    assert (storks.type, pages) == ("page_location", (1, 2))
    assert " ".join(storks.cited_text.split()) == "before the one that is quoted"
    assert parts.type == "content_block_location" and (parts.start_block_index, parts.end_block_index) == (0, 1)
    assert found.type == "search_result_location" and found.source == "https://example.org/herons"


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_messages_cite_the_right_places(scripted: str, streamed: bool) -> None:
    content = [*blocks(), {"type": "text", "text": "What do they do?"}]
    ask: Any = {"model": "scripted", "max_tokens": 400, "messages": [{"role": "user", "content": content}]}
    client = of_anthropic(scripted)
    if streamed:
        with client.messages.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        assert kinds.count("citation") == 4
    else:
        message = client.messages.create(**ask)
    check_citations(message)
    again = [*ask["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": "On?"}]
    check_citations(client.messages.create(**ask | {"messages": again}))


def test_anthropic_uploaded_file_is_cited_and_deleted(scripted: str) -> None:
    client = of_anthropic(scripted)
    uploaded = client.beta.files.upload(file=("herons.txt", HERONS.encode(), "text/plain"))
    source = {"type": "file", "file_id": uploaded.id}
    content: Any = [
        {"type": "document", "source": source, "citations": {"enabled": True}, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "What do they do?"},
    ]
    message = client.beta.messages.create(
        model="scripted",
        max_tokens=400,
        messages=[{"role": "user", "content": content}],
        betas=["files-api-2025-04-14"],
    )
    (cited,) = [each for block in message.content if block.type == "text" for each in block.citations or ()]
    assert cited.file_id == uploaded.id and cited.cited_text == quoted_of(HERONS)
    assert HERONS[cited.start_char_index : cited.end_char_index] == cited.cited_text
    client.beta.files.delete(uploaded.id)
    with pytest.raises(anthropic.NotFoundError):
        client.beta.files.retrieve_metadata(uploaded.id)


def test_openai_input_files_reach_the_prompt(scripted: str) -> None:
    client = of_openai(scripted)
    stored = client.files.create(file=("storks.pdf", PDF), purpose="user_data")
    data = f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}"
    for file in ({"file_id": stored.id}, {"filename": "storks.pdf", "file_data": data}):
        parts: Any = [{"type": "input_file", **file}, {"type": "input_text", "text": "What is it?"}]
        said = client.responses.create(model="scripted", input=[{"role": "user", "content": parts}]).output_text
        assert STORKS in said and said.endswith("What is it?")
        parts = [{"type": "file", "file": file}, {"type": "text", "text": "What is it?"}]
        answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": parts}])
        assert STORKS in (answer.choices[0].message.content or "")
    client.files.delete(stored.id)
    with pytest.raises(openai.BadRequestError, match="send file_data"):
        url: Any = [{"type": "input_file", "file_url": "https://example.org/a.pdf"}]
        client.responses.create(model="scripted", input=[{"role": "user", "content": url}])


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_file_search_returns_citations(scripted: str, streamed: bool) -> None:
    client = of_openai(scripted)
    store = client.vector_stores.create(name=f"Birds {streamed}")
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("storks.pdf", PDF), poll_interval_ms=50
    )
    assert file.status == "completed"
    (hit,) = client.vector_stores.search(store.id, query="Who nests on chimneys?")
    assert hit.content[0].text == STORKS and hit.file_id == file.id
    asked: Any = {
        "model": "scripted",
        "input": "Who nests on chimneys?",
        "tools": [{"type": "file_search", "vector_store_ids": [store.id]}],
        "include": ["file_search_call.results"],
    }
    if streamed:
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            answer: Any = stream.get_final_response()
        assert "response.file_search_call.completed" in kinds
        assert "response.output_text.annotation.added" in kinds
    else:
        answer = client.responses.create(**asked)
    search, message = answer.output
    assert search.type == "file_search_call" and search.results[0].text == STORKS
    (cited,) = message.content[0].annotations
    assert (cited.type, cited.file_id, cited.filename) == ("file_citation", file.id, "storks.pdf")
    assert 0 <= cited.index <= len(answer.output_text)
    assert client.vector_stores.delete(store.id).deleted
