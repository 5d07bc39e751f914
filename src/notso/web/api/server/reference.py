"""The API's reference as a page: `GET /docs`, made from the OpenAPI document, without scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from notso.web.api.server.openapi import document
from notso.web.edge.access import GUARDED

router = APIRouter()

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


@router.get("/docs", dependencies=[GUARDED])
async def reference(request: Request) -> Response:
    """Return this API's reference as a page."""
    page = await asyncio.to_thread(lambda: "".join(_page(document(request.app))))
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})


def _page(described: dict[str, Any]) -> Iterator[str]:
    schemas = described["components"]["schemas"]
    title = f"{described['info']['title']} {described['info']['version']}"
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}: API</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{escape(title)}: API</h1>'
    yield '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
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
        told = f"{_kind(field)} {field.get('description', '')}"
        yield f"<dt><code>{escape(name)}</code></dt><dd>{escape(told)}</dd>"
    yield "</dl></details>"


def _kind(schema: dict[str, Any]) -> str:
    """Return a type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    options = [_kind(each) for each in schema.get("anyOf", ())]
    if options:
        return " or ".join(dict.fromkeys(options))
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
