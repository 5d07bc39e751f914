"""Routes for OpenAI's vector stores, which are this server's document libraries.

Searches rank passages by the words that they share with the query, not by embeddings.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from notso.documents.values import MAX_FILE_BYTES, MIB, unreadable
from notso.web.api.request_fields.fields import (
    Fields,
    Label,
    Name,
    Notes,
    Text,
    hint,
    inert,
    invalid_field,
    notes_in,
    works,
)
from notso.web.api.request_fields.sampling_fields import Whole
from notso.web.api.shared.given_documents import DOCUMENT_PURPOSES, get_stored_file
from notso.web.api.shared.listing import paginate
from notso.web.api.shared.serializer import large_response
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, read_fields_and_headers
from notso.web.api.shared.vector_search import (
    MAX_RESULTS,
    RANKING_NOTES,
    RankingOptions,
    document_id_of,
    get_library,
    map_file_ids,
    search_libraries,
    store_id_of,
    to_search_result,
)
from notso.web.edge.access import GUARDED
from notso.web.edge.errors import ApiError
from notso.web.store.documents import MAX_LIBRARIES_OF_OWNER, Library, StoredDocument
from notso.web.store.records import StoredFile
from notso.web.values.ids import is_id
from notso.web.values.visible_text import sanitize_line

router = APIRouter()

MAX_FILES_AT_ONCE = 100
MAX_NAME_CHARACTERS = 100
MAX_QUERIES, MAX_QUERY_CHARACTERS = 16, 4_096
DEFAULT_RESULTS = 10
STATES: Mapping[str, str] = {
    "queued": "in_progress",
    "parsing": "in_progress",
    "ready": "completed",
    "failed": "failed",
}


class ChunkingStrategy(Fields):
    """How files are divided into passages; only the default is available."""

    type: Literal["auto", "static", "other"]
    static: dict[str, Any] | None = None


Query = Annotated[str, Field(max_length=MAX_QUERY_CHARACTERS)]
_CHUNKING = hint(
    "passages have about 220 tokens and do not cross pages", "`auto`", done=(ChunkingStrategy(type="auto"),)
)
Chunking = Annotated[ChunkingStrategy | None, _CHUNKING]
Metadata = Annotated[dict[str, Any] | None, hint("not stored", "an empty object", done=({},))]


class VectorStoreFields(Fields):
    """The body of POST /v1/vector_stores."""

    name: Label | None = None
    description: Annotated[Text | None, hint("not stored", "an empty string", done=("",))] = None
    file_ids: Annotated[list[Name], Field(max_length=MAX_FILES_AT_ONCE, fail_fast=True)] | None = None
    chunking_strategy: Chunking = None
    metadata: Metadata = None
    expires_after: None = None


class ChangedFields(Fields):
    """The body of POST /v1/vector_stores/{store_id}."""

    name: Label | None = None
    metadata: Metadata = None
    expires_after: None = None


class VectorStoreFileFields(Fields):
    """The body of POST /v1/vector_stores/{store_id}/files."""

    file_id: Name
    attributes: Annotated[
        dict[str, Any] | None, hint("not stored, because searches cannot be filtered", "an empty object", done=({},))
    ] = None
    chunking_strategy: Chunking = None


class SearchFields(Fields):
    """The body of POST /v1/vector_stores/{store_id}/search."""

    query: Query | Annotated[list[Query], Field(min_length=1, max_length=MAX_QUERIES, fail_fast=True)]
    max_num_results: Annotated[Whole, Field(ge=1, le=MAX_RESULTS)] | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: Annotated[bool | None, hint("queries are used unchanged", "false", done=(False,))] = None
    filters: None = None


_NAME = "the name of the store, and of its project on the page"

STORE_NOTES: Notes = {
    "name": works(f"{_NAME}; if it is taken, a number is appended"),
    "file_ids": works(f"up to {MAX_FILES_AT_ONCE} files, uploaded with purpose `assistants` or `user_data`"),
    "expires_after": inert("null", "delete the vector store when it is no longer needed"),
} | notes_in(VectorStoreFields)
CHANGED_NOTES: Notes = {
    "name": works(f"{_NAME}; if empty, the name is kept; status 409 if the new name is taken"),
    "expires_after": STORE_NOTES["expires_after"],
} | notes_in(ChangedFields)
FILE_NOTES: Notes = {
    "file_id": works("a file uploaded with purpose `assistants` or `user_data`"),
} | notes_in(VectorStoreFileFields)
SEARCH_NOTES: Notes = {
    "query": works(
        f"up to {MAX_QUERY_CHARACTERS:,} characters, or a list of up to {MAX_QUERIES} queries; finds passages that "
        "contain words of the queries"
    ),
    "max_num_results": works(f"maximum number of passages to return, 1 to {MAX_RESULTS}; default {DEFAULT_RESULTS}"),
    "ranking_options": works("an object with `score_threshold`"),
    "filters": inert("null", "use a separate vector store for each set of files to search"),
} | notes_in(SearchFields)


@router.post("/v1/vector_stores", dependencies=[GUARDED])
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Create a vector store for searches and `file_search`."""
    fields, headers = await read_fields_and_headers(request, VectorStoreFields, STORE_NOTES)
    file_ids = list(dict.fromkeys(fields.file_ids or ()))
    for at, file_id in enumerate(file_ids):
        await _get_document_file(services, owner, file_id, f"file_ids.{at}")
    library = await _new_library(services, owner, _cleaned(fields.name) or "Vector store")
    try:
        for file_id in file_ids:
            await _add(services, owner, library, file_id, "file_ids")
    except Exception:  # the client never receives the store's id, so the store is deleted
        await services.shared.store.documents.delete_library(owner, library.id)
        raise
    return JSONResponse(await _store_object(services, owner, library), headers=headers)


@router.get("/v1/vector_stores", dependencies=[GUARDED])
async def stores(request: Request, services: Services, owner: Owner) -> Response:
    """List vector stores, newest first, including stores of other users that the caller may read."""
    documents = defaultdict[str, list[StoredDocument]](list)
    for each in await services.shared.store.documents.documents(owner):
        documents[each.library_id].append(each)
    found = await services.shared.store.documents.libraries(owner)
    shown = [_describe_store(library, documents[library.id]) for library in found]
    return JSONResponse(paginate(shown, request.query_params))


@router.get("/v1/vector_stores/{store_id}", dependencies=[GUARDED])
async def show(services: Services, owner: Owner, store_id: str) -> Response:
    """Return a vector store with the number of its files."""
    return JSONResponse(await _store_object(services, owner, await get_library(services, owner, store_id)))


@router.post("/v1/vector_stores/{store_id}", dependencies=[GUARDED])
async def change(request: Request, services: Services, owner: Owner, store_id: str) -> Response:
    """Rename a vector store."""
    library = await get_library(services, owner, store_id, rights=("own",))
    fields, headers = await read_fields_and_headers(request, ChangedFields, CHANGED_NOTES)
    if name := _cleaned(fields.name):
        changed = await services.shared.store.documents.change_library(owner, library.id, name=name)
        if not changed:
            raise ApiError(409, "conflict", "a vector store with that name already exists", param="name")
    found = await get_library(services, owner, store_id)
    return JSONResponse(await _store_object(services, owner, found), headers=headers)


@router.delete("/v1/vector_stores/{store_id}", dependencies=[GUARDED])
async def delete(services: Services, owner: Owner, store_id: str) -> Response:
    """Delete a vector store with its documents. Uploaded files are kept."""
    library = await get_library(services, owner, store_id, rights=("own",))
    await services.shared.store.documents.delete_library(owner, library.id)
    return JSONResponse({"id": store_id, "object": "vector_store.deleted", "deleted": True})


@router.post("/v1/vector_stores/{store_id}/search", dependencies=[GUARDED])
async def search(request: Request, services: Services, owner: Owner, store_id: str) -> Response:
    """Return the passages that contain words of the query, best first."""
    library = await get_library(services, owner, store_id)
    fields, headers = await read_fields_and_headers(request, SearchFields, SEARCH_NOTES | RANKING_NOTES)
    queries = [fields.query] if isinstance(fields.query, str) else fields.query
    hits = await search_libraries(
        services, owner, [library], queries, fields.max_num_results or DEFAULT_RESULTS, fields.ranking_options
    )
    names = await map_file_ids(services, owner, (each.document for each in hits))
    data = [to_search_result(each, names[each.document.id]) for each in hits]
    for each in data:
        each["content"] = [{"type": "text", "text": each.pop("text")}]
    body = {"object": "vector_store.search_results.page", "search_query": queries, "data": data}
    return JSONResponse({**body, "has_more": False, "next_page": None}, headers=headers)


@router.post("/v1/vector_stores/{store_id}/files", dependencies=[GUARDED])
async def add_file(request: Request, services: Services, owner: Owner, store_id: str) -> Response:
    """Add an uploaded file to a vector store, and parse it in the background."""
    library = await get_library(services, owner, store_id, rights=("own", "add"))
    fields, headers = await read_fields_and_headers(request, VectorStoreFileFields, FILE_NOTES)
    document = await _add(services, owner, library, fields.file_id, "file_id")
    return JSONResponse(_file_object(document, fields.file_id), headers=headers)


@router.get("/v1/vector_stores/{store_id}/files", dependencies=[GUARDED])
async def files(request: Request, services: Services, owner: Owner, store_id: str) -> Response:
    """List the documents of a vector store, newest first."""
    library = await get_library(services, owner, store_id)
    status = request.query_params.get("filter")
    found = await services.shared.store.documents.documents(owner, library.id)
    names = await map_file_ids(services, owner, found)
    shown = [_file_object(each, names[each.id]) for each in found if status in (None, STATES[each.state])]
    return JSONResponse(paginate(shown, request.query_params))


@router.get("/v1/vector_stores/{store_id}/files/{file_id}", dependencies=[GUARDED])
async def show_file(services: Services, owner: Owner, store_id: str, file_id: str) -> Response:
    """Return the state of a document."""
    library = await get_library(services, owner, store_id)
    return JSONResponse(_file_object(await _document(services, owner, library, file_id), file_id))


@router.get("/v1/vector_stores/{store_id}/files/{file_id}/content", dependencies=[GUARDED])
async def file_content(services: Services, owner: Owner, store_id: str, file_id: str) -> Response:
    """Return the text that was extracted from a document."""
    library = await get_library(services, owner, store_id)
    document = await _document(services, owner, library, file_id)
    found = await services.shared.store.documents.text(owner, document.id)
    data = [] if found is None else [{"type": "text", "text": found.text}]
    body = {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}
    return await large_response(lambda: body)


@router.delete("/v1/vector_stores/{store_id}/files/{file_id}", dependencies=[GUARDED])
async def remove_file(services: Services, owner: Owner, store_id: str, file_id: str) -> Response:
    """Delete a document with everything derived from it. The uploaded file is kept."""
    library = await get_library(services, owner, store_id, rights=("own",))
    document = await _document(services, owner, library, file_id)
    await services.shared.store.documents.delete(owner, document.id)
    return JSONResponse({"id": file_id, "object": "vector_store.file.deleted", "deleted": True})


def _cleaned(name: str | None) -> str:
    return sanitize_line(name or "", MAX_NAME_CHARACTERS)


async def _new_library(services: ApiServices, owner: str, name: str) -> Library:
    documents = services.shared.store.documents
    taken = {each.name for each in await documents.libraries(owner) if each.owner == owner}
    if len(taken) < MAX_LIBRARIES_OF_OWNER:
        numbers = range(2, MAX_LIBRARIES_OF_OWNER + 1)
        for numbered in (name, *(f"{name[: MAX_NAME_CHARACTERS - 8]} ({number})" for number in numbers)):
            # The result is None if a concurrent request has taken the name or reached the limit.
            if numbered not in taken and (library := await documents.new_library(owner, numbered)) is not None:
                return library
    message = f"there are already {MAX_LIBRARIES_OF_OWNER} vector stores and projects; delete some"
    raise ApiError(429, "too_many", message)


async def _store_object(services: ApiServices, owner: str, library: Library) -> dict[str, Any]:
    return _describe_store(library, await services.shared.store.documents.documents(owner, library.id))


def _describe_store(library: Library, documents: Sequence[StoredDocument]) -> dict[str, Any]:
    counts = Counter(STATES[each.state] for each in documents)
    shown = {state: counts[state] for state in ("in_progress", "completed", "failed")}
    return {
        "id": store_id_of(library.id),
        "object": "vector_store",
        "created_at": library.created_ms // 1000,
        "name": library.name,
        "usage_bytes": sum(each.size for each in documents),
        "file_counts": {**shown, "cancelled": 0, "total": sum(shown.values())},
        "status": "in_progress" if shown["in_progress"] else "completed",
        "expires_after": None,
        "expires_at": None,
        "last_active_at": library.created_ms // 1000,
        "metadata": {},
    }


def _file_object(document: StoredDocument, file_id: str) -> dict[str, Any]:
    error = (
        {"code": "invalid_file", "message": str(unreadable(document.reason))} if document.state == "failed" else None
    )
    return {
        "id": file_id,
        "object": "vector_store.file",
        "created_at": document.created_ms // 1000,
        "usage_bytes": document.size,
        "vector_store_id": store_id_of(document.library_id),
        "status": STATES[document.state],
        "last_error": error,
        "attributes": {},
        "chunking_strategy": {"type": "other"},
    }


async def _get_document_file(services: ApiServices, owner: str, file_id: str, param: str) -> StoredFile:
    file = await get_stored_file(services, owner, file_id, param)
    if file.purpose not in DOCUMENT_PURPOSES:
        raise invalid_field(param, f"{param} must be a file with purpose {' or '.join(DOCUMENT_PURPOSES)}")
    if file.size > MAX_FILE_BYTES or not file.size:
        raise invalid_field(param, f"{param} must be a file of 1 byte to {MAX_FILE_BYTES // MIB} MiB")
    return file


async def _add(services: ApiServices, owner: str, library: Library, file_id: str, param: str) -> StoredDocument:
    file = await _get_document_file(services, owner, file_id, param)
    content = b"".join([part async for part in services.shared.store.records.content(owner, file.id)])
    return await services.shared.store.documents.add(
        owner, library.id, file.name, content, document_id=document_id_of(file_id, library.id)
    )


async def _document(services: ApiServices, owner: str, library: Library, file_id: str) -> StoredDocument:
    ids = [document_id_of(file_id, library.id), *filter(is_id, [file_id.removeprefix("file-")])]
    for each in await services.shared.store.documents.some(owner, ids):
        if each.library_id == library.id:
            return each
    # If the library already contained a document with the same content, none was added for this file. The existing
    # document has an unrelated id, so it is found by the hash of its content.
    file = await services.shared.store.records.file(owner, file_id)
    if file is not None and file.size <= MAX_FILE_BYTES:
        parts = [part async for part in services.shared.store.records.content(owner, file_id)]
        digest = await asyncio.to_thread(lambda: hashlib.sha256(b"".join(parts)).hexdigest())
        for each in await services.shared.store.documents.documents(owner, library.id):
            if each.sha256 == digest:
                return each
    raise ApiError(404, "not_found", "the vector store has no file with that id", param="file_id")
