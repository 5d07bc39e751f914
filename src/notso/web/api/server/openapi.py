"""The OpenAPI document, generated from the routes and the field tables that validate requests.

The schemas of responses are written in a short notation:

"string": a value of this type. A final `?` ("string?") means that the value may be null; "any" is any value.
"@Name": the component with this name.
[type]: an array of this type.
{names: type}: an object. Names are separated by spaces; a property whose name ends with `?` may be missing.

`GET /docs` shows the document as an HTML page without scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, JSONResponse, Response

from notso.extras import installed_release
from notso.web.api.server.compatibility import ENDPOINTS
from notso.web.edge.access import GUARDED, public
from notso.web.edge.errors import OLLAMA_PREFIX, is_api_path

SCHEMAS = "#/components/schemas/"

_DETAILS = {
    "parent_model format family parameter_size quantization_level": "string",
    "families": ["string"],
    "context_length?": "integer",
}
_COUNTS = {
    "total_duration? load_duration? prompt_eval_count? prompt_eval_duration? eval_count? eval_duration?": "integer"
}
_OLLAMA = {"model": "string", "created_at": "string", "done": "boolean", "done_reason?": "string", **_COUNTS}
_TEXT = {"type text": "string"}


def _list_of(item: str) -> dict[str, Any]:
    return {"object": "string", "data": [item], "first_id last_id": "string?", "has_more": "boolean"}


COMPONENTS: dict[str, Any] = {
    "Usage": {
        "prompt_tokens completion_tokens total_tokens": "integer",
        "prompt_tokens_details": {"cached_tokens": "integer"},
        "completion_tokens_details": {"reasoning_tokens": "integer"},
    },
    "Timings": {
        "cache_n prompt_n predicted_n": "integer",
        "prompt_ms prompt_per_token_ms prompt_per_second": "number",
        "predicted_ms predicted_per_token_ms predicted_per_second": "number",
        "draft_n? draft_n_accepted?": "integer",
        "reasoning_mode?": "string",
    },
    "TokenLogprob": {"token": "string", "logprob": "number", "bytes": ["integer"], "top_logprobs?": ["@TokenLogprob"]},
    "ToolCall": {"id": "string", "type": "string", "function": {"name": "string", "arguments": "string"}},
    "ChatCompletion": {
        "id object model system_fingerprint": "string",
        "created": "integer",
        "choices": [
            {
                "index": "integer",
                "message": {
                    "role": "string",
                    "content refusal": "string?",
                    "reasoning_content?": "string",
                    "tool_calls?": ["@ToolCall"],
                },
                "logprobs": "object?",
                "finish_reason": "string",
            }
        ],
        "usage": "@Usage",
        "timings": "@Timings",
    },
    "TextCompletion": {
        "id object model system_fingerprint": "string",
        "created": "integer",
        "choices": [{"index": "integer", "text": "string", "logprobs": "object?", "finish_reason": "string"}],
        "usage": "@Usage",
        "timings": "@Timings",
    },
    "Completion": {
        "content model prompt stop_type stopping_word": "string",
        "index id_slot tokens_predicted tokens_evaluated tokens_cached": "integer",
        "stop has_new_line truncated": "boolean",
        "tokens": ["integer"],
        "generation_settings": "object",
        "completion_probabilities?": ["object"],
        "timings": "@Timings",
    },
    "Model": {
        "id object owned_by": "string",
        "created": "integer",
        "aliases?": ["string"],
        "meta?": "object",
        "parent? root?": "string",
    },
    "Models": {"object": "string", "data": ["@Model"]},
    "Message": {
        "id type role model": "string",
        "content": ["object"],
        "stop_reason": "string",
        "stop_sequence": "string?",
        "context_management?": "object",
        "usage": {
            "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens": "integer",
            "output_tokens_details": {"thinking_tokens": "integer"},
        },
    },
    "Response": {
        "id object status model service_tier truncation": "string",
        "created_at": "integer",
        "error incomplete_details": "object?",
        "output": ["object"],
        "usage": "object?",
        "background parallel_tool_calls store": "boolean",
        "instructions previous_response_id": "string?",
        "prompt_cache_key safety_identifier user": "string?",
        "completed_at max_output_tokens max_tool_calls": "integer?",
        "top_logprobs": "integer",
        "frequency_penalty presence_penalty": "number",
        "temperature top_p": "number?",
        "metadata reasoning text": "object",
        "tool_choice": "any",
        "tools": ["object"],
        "conversation?": "any",
    },
    "File": {
        "id object filename purpose status": "string",
        "bytes created_at": "integer",
        "expires_at": "integer?",
        "status_details": "string?",
    },
    "Batch": {
        "id object endpoint input_file_id completion_window status": "string",
        "errors": "object?",
        "output_file_id error_file_id": "string?",
        "created_at expires_at": "integer",
        "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at": "integer?",
        "request_counts": {"total completed failed": "integer"},
        "metadata": "object?",
    },
    "VectorStore": {
        "id object name status": "string",
        "created_at last_active_at usage_bytes": "integer",
        "file_counts": {"in_progress completed failed cancelled total": "integer"},
        "expires_after": "object?",
        "expires_at": "integer?",
        "metadata": "object",
    },
    "VectorStoreFile": {
        "id object vector_store_id status": "string",
        "created_at usage_bytes": "integer",
        "last_error": "object?",
        "attributes chunking_strategy": "object",
    },
    "Deleted": {"id": "string", "object": "string", "deleted": "boolean"},
    "InputTokens": {"object": "string", "input_tokens": "integer"},
    "Embeddings": {
        "object": "string",
        "data": [{"object": "string", "index": "integer", "embedding": "any"}],
        "model": "string",
        "usage": {"prompt_tokens": "integer", "total_tokens": "integer"},
    },
    "Health": {"status": "string", "model?": "string", "demo?": "boolean", "device?": "string", "missing?": ["string"]},
    "OllamaChat": {
        **_OLLAMA,
        "message": {"role": "string", "content": "string", "thinking?": "string", "tool_calls?": ["object"]},
        "logprobs?": ["object"],
    },
    "OllamaGenerate": {**_OLLAMA, "response thinking?": "string", "context?": ["integer"], "logprobs?": ["object"]},
    "OllamaModels": {
        "models": [
            {
                "name model modified_at digest": "string",
                "size": "integer",
                "details": _DETAILS,
                "expires_at?": "string",
                "size_vram? context_length?": "integer",
            }
        ]
    },
    "Error": {"error": {"message": "string", "type": "string", "param?": "string?", "code?": "string?"}},
    "OllamaError": {"error": "string"},
}

REFUSED = frozenset(
    (
        *(f"POST {prefix}/{name}" for prefix in ("", "/v1") for name in ("rerank", "reranking", "infill")),
        *(f"POST /api/{name}" for name in ("push", "create", "copy")),
        "DELETE /api/delete",
    )
)
"""Operations that always return an error."""

STREAMED = {
    **dict.fromkeys(
        (
            *("POST /v1/chat/completions", "POST /v1/completions", "POST /completion", "POST /v1/messages"),
            *("POST /v1/responses", "GET /v1/responses/{response_id}", "GET /v1/stream"),
        ),
        "text/event-stream",
    ),
    **dict.fromkeys(("POST /api/chat", "POST /api/generate", "POST /api/pull"), "application/x-ndjson"),
}
"""Operations that can stream their response, and the media type of the stream."""

OTHER_TYPES = {
    "GET /metrics": "text/plain",
    "POST /v1/load_lora_adapter": "text/plain",
    "POST /v1/unload_lora_adapter": "text/plain",
    "GET /docs": "text/html",
    "GET /v1/files/{file_id}/content": "application/octet-stream",
}
"""Operations that do not return JSON, and the media type of their response."""

_BODIES: dict[str, Any] = {
    "GET /health": "@Health",
    "GET /livez": {"status": "string"},
    "GET /version": {"version": "string"},
    "GET /load": {"server_load": "integer"},
    "GET /props": {
        "default_generation_settings": {"n_ctx": "integer", "params": "object"},
        "total_slots n_params size threads": "integer",
        "model_alias model_path build_info chat_template bos_token eos_token device kernels kv_format": "string",
        "modalities quantization": "object",
        "is_demo is_sleeping": "boolean",
    },
    "GET /slots": [{"id": "integer", "n_ctx": "integer", "is_processing": "boolean"}],
    "GET /v1/models": "@Models",
    "GET /v1/models/{name}": "@Model",
    "POST /v1/chat/completions": "@ChatCompletion",
    "POST /v1/chat/completions/control": {"id": "string", "action": "string", "success": "boolean"},
    **dict.fromkeys(("POST /v1/chat/completions/input_tokens", "POST /v1/responses/input_tokens"), "@InputTokens"),
    "DELETE /v1/stream": {"conv_id": "string", "id": "string", "stopped": "boolean"},
    "POST /v1/completions": "@TextCompletion",
    "POST /completion": "@Completion",
    "POST /v1/embeddings": "@Embeddings",
    "POST /embedding": [{"index": "integer", "embedding": [["number"]]}],
    "POST /v1/messages": "@Message",
    "POST /v1/messages/count_tokens": {"input_tokens": "integer", "context_management?": "object"},
    **dict.fromkeys(("POST /v1/responses", "POST /v1/responses/{response_id}/cancel"), "@Response"),
    "GET /v1/responses/{response_id}": "@Response",
    "DELETE /v1/responses/{response_id}": "@Deleted",
    "GET /v1/responses/{response_id}/input_items": _list_of("object"),
    **dict.fromkeys(("POST /v1/files", "GET /v1/files/{file_id}"), "@File"),
    "GET /v1/files": _list_of("@File"),
    "DELETE /v1/files/{file_id}": "@Deleted",
    **dict.fromkeys(("POST /v1/batches", "GET /v1/batches/{batch_id}"), "@Batch"),
    "POST /v1/batches/{batch_id}/cancel": "@Batch",
    "GET /v1/batches": _list_of("@Batch"),
    "POST /v1/vector_stores": "@VectorStore",
    "GET /v1/vector_stores": _list_of("@VectorStore"),
    **{f"{verb} /v1/vector_stores/{{store_id}}": "@VectorStore" for verb in ("GET", "POST")},
    "DELETE /v1/vector_stores/{store_id}": "@Deleted",
    "POST /v1/vector_stores/{store_id}/files": "@VectorStoreFile",
    "GET /v1/vector_stores/{store_id}/files/{file_id}": "@VectorStoreFile",
    "DELETE /v1/vector_stores/{store_id}/files/{file_id}": "@Deleted",
    "GET /v1/vector_stores/{store_id}/files": _list_of("@VectorStoreFile"),
    "POST /v1/vector_stores/{store_id}/search": {
        "object": "string",
        "search_query": ["string"],
        "data": [{"file_id filename": "string", "score": "number", "attributes": "object", "content": [_TEXT]}],
        "has_more": "boolean",
        "next_page": "string?",
    },
    "GET /v1/vector_stores/{store_id}/files/{file_id}/content": {
        "object": "string",
        "data": [_TEXT],
        "has_more": "boolean",
        "next_page": "string?",
    },
    "POST /api/chat": "@OllamaChat",
    "POST /api/generate": "@OllamaGenerate",
    "POST /api/embed": {"model": "string", "embeddings": [["number"]], **_COUNTS},
    "POST /api/embeddings": {"embedding": ["number"]},
    "GET /api/version": {"version": "string", "notso": "string"},
    **dict.fromkeys(("GET /api/tags", "GET /api/ps"), "@OllamaModels"),
    "POST /api/show": {
        "license modelfile parameters template modified_at": "string",
        "details": _DETAILS,
        "model_info": "object",
        "capabilities": ["string"],
    },
    "POST /api/pull": {"status": "string"},
    "POST /tokenize": {"tokens": ["any"], "count?": "integer", "max_model_len?": "integer", "token_strs?": ["string"]},
    "POST /detokenize": {"content": "string", "prompt": "string"},
    "GET /tokenizer_info": {
        "tokenizer_class": "string",
        "bos_token": "string?",
        "eos_token": "string",
        "model_max_length": "integer",
    },
    "POST /apply-template": {"prompt": "string", "n_tokens": "integer"},
    "GET /openapi.json": "object",
}
"""Schemas of the JSON responses, in the notation described above. Routes with the same function share a schema."""


def _content(operation: str) -> dict[str, Any]:
    spec = _BODIES.get(operation)
    types = [each[operation] for each in (STREAMED, OTHER_TYPES) if operation in each]
    return ({} if spec is None else {"application/json": {"schema": schema_of(spec)}}) | {
        kind: {"schema": {"type": "string"}} for kind in types
    }


def schema_of(spec: Any) -> dict[str, Any]:
    """Return the JSON schema of a type given in this module's notation."""
    if isinstance(spec, list):
        return {"type": "array", "items": schema_of(spec[0])}
    if isinstance(spec, dict):
        properties = {name: schema_of(each) for names, each in spec.items() for name in names.split()}
        return {
            "type": "object",
            "required": [name for name in properties if not name.endswith("?")],
            "properties": {name.removesuffix("?"): schema for name, schema in properties.items()},
        }
    if spec.startswith("@"):
        return {"$ref": SCHEMAS + spec[1:]}
    if spec == "any":
        return {}
    return {"type": [spec[:-1], "null"] if spec.endswith("?") else spec}


router = APIRouter()

PUBLIC = ("/health", "/ping", "/livez", "/metrics", "/openapi.json", "/docs")


@router.get("/openapi.json", dependencies=[GUARDED])
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(await asyncio.to_thread(document, request.app))


@cache
def _schemas() -> tuple[dict[str, str], dict[str, Any]]:
    # Returns the references to body schemas by endpoint, and the schemas by name. Callers must not modify them. The
    # result is cached, because building the schemas takes half a second.
    kinds: list[type[BaseModel]] = [endpoint.fields for endpoint in ENDPOINTS]
    named, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=SCHEMAS + "{model}", by_alias=True
    )
    bodies = {endpoint.path: named[endpoint.fields, "validation"]["$ref"] for endpoint in ENDPOINTS}
    bodies["POST /apply-template"] = bodies["POST /v1/chat/completions"]
    definitions = schemas["$defs"]
    for endpoint in ENDPOINTS:
        properties = definitions[bodies[endpoint.path].removeprefix(SCHEMAS)]["properties"]
        for name, property in properties.items():
            property["description"] = endpoint.notes[name].described
    return bodies, definitions


def document(app: FastAPI) -> dict[str, Any]:
    bodies, definitions = _schemas()
    routes = list(_routes(app))
    contents: dict[Any, dict[str, Any]] = {}  # keyed by the route's function
    for method, path, route in routes:
        contents[route.endpoint] = contents.get(route.endpoint) or _content(f"{method} {path}")
    paths: dict[str, Any] = {}
    for method, path, route in routes:
        content = {} if method == "HEAD" else contents[route.endpoint]
        operation = _operation(method, path, route, bodies.get(f"{method} {path}"), content)
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "notso-smollm3-bot", "version": installed_release()},
        "paths": paths,
        "components": {
            "schemas": definitions | {name: schema_of(spec) for name, spec in COMPONENTS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _routes(app: FastAPI) -> Iterator[tuple[str, str, APIRoute]]:
    for context in iter_route_contexts(app.routes):
        route = cast(APIRoute, context.original_route)
        path = str(context.path).replace(":path}", "}")
        if is_api_path(path) or path in PUBLIC:
            for method in sorted(route.methods or ()):
                yield method, path, route


def _operation(method: str, path: str, route: APIRoute, body: str | None, content: dict[str, Any]) -> dict[str, Any]:
    text = route.description
    is_public = any(each.dependency is public for each in route.dependencies)
    shape = "OllamaError" if path.startswith(OLLAMA_PREFIX) else "Error"
    error = {"description": "The error", "content": {"application/json": {"schema": {"$ref": SCHEMAS + shape}}}}
    success = {"200": {"description": "The response", **({"content": content} if content else {})}}
    operation: dict[str, Any] = {
        "summary": text.partition(". ")[0].rstrip("."),
        "description": " ".join(text.split()),
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {**({} if f"{method} {path}" in REFUSED else success), "4XX": error, "5XX": error},
        "security": [] if is_public else [{"bearer": []}, {"key": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": body}}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names or path == "/v1/stream":
        parameters = [(name, "path", True) for name in names]
        if path == "/v1/stream":
            parameters += [("conv_id", "query", True), *([("from", "query", False)] if method == "GET" else [])]
        operation["parameters"] = [
            {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
            for name, place, required in parameters
        ]
    return operation


reference_router = APIRouter()

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
details details { margin-left: 1rem; }
dl { margin: 0 0 1rem 1rem; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem 1rem; }
"""


@reference_router.get("/docs", dependencies=[GUARDED])
async def reference(request: Request) -> Response:
    """Return this API's reference as a page."""
    page = await asyncio.to_thread(lambda: "".join(_page(document(request.app))))
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})


def _page(described: dict[str, Any]) -> Iterator[str]:
    schemas = described["components"]["schemas"]
    title = f"{described['info']['title']} {described['info']['version']}"
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}: API</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{escape(title)}: API</h1>'
    yield '<p>Machine-readable: <a href="openapi.json">openapi.json</a>.</p>'
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            yield f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
            yield f"</summary><p>{escape(operation['description'])}</p>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                yield from _fields("Request", body["schema"], schemas)
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items() if status.startswith("2") else ():
                    yield from _fields(f"Response {status}: {kind}", content["schema"], schemas)
            yield "</details>"


def _fields(title: str, schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    target = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    properties = target.get("properties", {})
    yield f"<details><summary>{escape(title)}</summary><dl>"
    for name, field in properties.items():
        text = f"{_kind(field)} {field.get('description', '')}"
        yield f"<dt><code>{escape(name)}</code></dt><dd>{escape(text)}</dd>"
    yield "</dl></details>"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    options = [_kind(each) for each in schema.get("anyOf", ())]
    if options:
        return " or ".join(dict.fromkeys(options))
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
