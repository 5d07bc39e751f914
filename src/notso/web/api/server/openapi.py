"""OpenAPI document, generated from the routes and the field tables that validate requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from notso.web.api.server.answers import SCHEMAS, components, responses_of
from notso.web.api.server.compatibility import ADDRESSES
from notso.web.api.shared.completion import release
from notso.web.edge.access import GUARDED, public
from notso.web.edge.api_error import OLLAMA_PREFIX
from notso.web.edge.errors import is_api_path

router = APIRouter()

PUBLIC = ("/health", "/ping", "/livez", "/metrics", "/openapi.json", "/docs")


@router.get("/openapi.json", dependencies=[GUARDED])
async def openapi(request: Request) -> Response:
    """Return this document."""
    return JSONResponse(await asyncio.to_thread(document, request.app))


def document(app: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI document."""
    kinds: list[type[BaseModel]] = [address.fields for address in ADDRESSES]
    named, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=SCHEMAS + "{model}", by_alias=True
    )
    bodies = {address.path: named[address.fields, "validation"]["$ref"] for address in ADDRESSES}
    bodies["POST /apply-template"] = bodies["POST /v1/chat/completions"]
    definitions = schemas["$defs"]
    for address in ADDRESSES:
        properties = definitions[bodies[address.path].removeprefix(SCHEMAS)]["properties"]
        for name, property in properties.items():
            property["description"] = address.notes[name].described
    paths: dict[str, Any] = {}
    for method, path, route in _routes(app):
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, route, bodies.get(f"{method} {path}"))
    return {
        "openapi": "3.1.0",
        "info": {"title": "notso-smollm3-bot", "version": release()},
        "paths": paths,
        "components": {
            "schemas": definitions | components() | {"Error": _ERROR, "OllamaError": _OLLAMA_ERROR},
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


def _operation(method: str, path: str, route: APIRoute, body: str | None) -> dict[str, Any]:
    said = inspect.getdoc(route.endpoint) or ""
    is_public = any(each.dependency is public for each in route.dependencies)
    shape = "OllamaError" if path.startswith(OLLAMA_PREFIX) else "Error"
    error = {"description": "What is wrong", "content": {"application/json": {"schema": {"$ref": SCHEMAS + shape}}}}
    operation: dict[str, Any] = {
        "summary": said.partition(". ")[0].rstrip("."),
        "description": " ".join(said.split()),
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {**responses_of(f"{method} {path}"), "4XX": error, "5XX": error},
        "security": [] if is_public else [{"bearer": []}, {"key": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": body}}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names or path == "/v1/stream":
        asked = [(name, "path", True) for name in names]
        if path == "/v1/stream":
            asked += [("conv_id", "query", True), *([("from", "query", False)] if method == "GET" else [])]
        operation["parameters"] = [
            {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
            for name, place, required in asked
        ]
    return operation


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
