"""The compatibility page comes from the table that validates requests, and lists every field of the clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from anthropic.types import message_count_tokens_params as count
from anthropic.types import message_create_params as message
from fastapi.routing import iter_route_contexts
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.responses import input_token_count_params as input_tokens
from openai.types.responses import response_create_params as response
from pydantic import TypeAdapter

from notso.web.api.request_fields.fields import Fields
from notso.web.api.server.compatibility import ENDPOINTS, Endpoint, render_page

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"

CLIENTS: dict[str, Any] = {
    "POST /v1/chat/completions": chat.CompletionCreateParamsBase,
    "POST /v1/messages": message.MessageCreateParamsBase,
    "POST /v1/messages/count_tokens": count.MessageCountTokensParams,
    "POST /v1/responses": response.ResponseCreateParamsBase,
    "POST /v1/responses/input_tokens": input_tokens.InputTokenCountParams,
    "POST /v1/completions": text.CompletionCreateParamsBase,
}


def test_compatibility_page_is_up_to_date() -> None:
    made = "run: python -m notso.web.api.server.compatibility > docs/compatibility.md"
    assert DOCUMENT.read_text("utf-8") == render_page(), made


@pytest.mark.parametrize("address", ENDPOINTS, ids=lambda address: address.path)
def test_notes_marked_accepted_match_model_fields(address: Endpoint) -> None:
    taken = {name for name, note in address.notes.items() if note.is_accepted}
    assert taken == {field.alias or name for name, field in address.fields.model_fields.items()}
    assert all(note.described for note in (address.notes | address.within).values())


def fields_classes(kind: type[Fields] = Fields) -> Iterator[type[Fields]]:
    for each in kind.__subclasses__():
        yield each
        yield from fields_classes(each)


def test_every_optional_field_accepts_null() -> None:
    fields = [field for kind in fields_classes() for field in kind.model_fields.values() if not field.is_required()]
    assert len(fields) > 100
    for field in fields:  # an error shows the annotation
        TypeAdapter(Annotated[field.annotation, *field.metadata, None]).validate_python(None)


@pytest.mark.parametrize("path", CLIENTS)
def test_every_client_field_has_compatibility_note(path: str) -> None:
    (address,) = [each for each in ENDPOINTS if each.path == path]
    assert not CLIENTS[path].__annotations__.keys() - address.notes.keys()


def test_openapi_document_matches_routes_and_fields(shared: Any) -> None:
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
    for address in ENDPOINTS:
        method, path = address.path.split()
        schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = document["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
        assert {name: each["description"] for name, each in properties.items()} == {
            name: note.described for name, note in address.notes.items() if note.is_accepted
        }
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["paths"]["/v1/models"]["get"]["security"]
