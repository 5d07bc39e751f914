"""The compatibility page comes from the table that validates requests, and lists every field of the clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params as count
from anthropic.types import message_create_params as message
from fastapi.routing import iter_route_contexts
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.responses import input_token_count_params as input_tokens
from openai.types.responses import response_create_params as response

from notso.web.api.server.compatibility import ADDRESSES, Address, page

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"

CLIENTS: dict[str, Any] = {
    "POST /v1/chat/completions": chat.CompletionCreateParamsBase,
    "POST /v1/messages": message.MessageCreateParamsBase,
    "POST /v1/messages/count_tokens": count.MessageCountTokensParams,
    "POST /v1/responses": response.ResponseCreateParamsBase,
    "POST /v1/responses/input_tokens": input_tokens.InputTokenCountParams,
    "POST /v1/completions": text.CompletionCreateParamsBase,
}


def test_the_page_is_made_from_the_table() -> None:
    made = "run: python -m notso.web.api.server.compatibility > docs/compatibility.md"
    assert DOCUMENT.read_text("utf-8") == page(), made


@pytest.mark.parametrize("address", ADDRESSES, ids=lambda address: address.path)
def test_what_works_is_taken_and_what_is_refused_is_not(address: Address) -> None:
    taken = {name for name, note in address.notes.items() if note.is_taken}
    assert taken == {field.alias or name for name, field in address.fields.model_fields.items()}
    assert all(note.described for note in (address.notes | address.within).values())


@pytest.mark.parametrize("path", CLIENTS)
def test_no_field_of_the_client_is_forgotten(path: str) -> None:
    (address,) = [each for each in ADDRESSES if each.path == path]
    assert not CLIENTS[path].__annotations__.keys() - address.notes.keys()


def test_the_openapi_document_is_of_this_application(shared: Any) -> None:
    document = shared.client.get("/openapi.json").json()
    operations = {f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each}
    served = {
        f"{method} {str(context.path).replace(':path}', '}')}"
        for context in iter_route_contexts(shared.app.routes)
        for method in context.original_route.methods  # type: ignore[attr-defined]
    }
    assert operations <= served
    for name in served - operations:
        assert not re.match(r"\w+ /(v1/|tokenize|detokenize|props|slots|health|livez|metrics)", name), name
    text = json.dumps(document)
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert reference in document["components"]["schemas"], reference
    for address in ADDRESSES:
        method, path = address.path.split()
        schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = document["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
        assert {name: each["description"] for name, each in properties.items()} == {
            name: note.described for name, note in address.notes.items() if note.is_taken
        }
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["paths"]["/v1/models"]["get"]["security"]
