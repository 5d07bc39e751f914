"""Routes of documents, for example to upload and search them, and to show their text by page.

Documents attached in a temporary chat are not stored: /attachments returns their text, and the page attaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Response
from starlette.responses import JSONResponse, RedirectResponse

from notso.documents.citations import MAX_QUOTE_CHARACTERS, revision_of
from notso.documents.passages import page_at
from notso.documents.reading import DocumentReader
from notso.documents.values import UnreadableError, unreadable
from notso.web.chat.chat_view import require
from notso.web.chat.library import display_name
from notso.web.chat.views import Fields, Page, PageRequest, find_chat, find_project, render_page
from notso.web.edge.access import GUARDED
from notso.web.store.documents import DEFAULT_LIBRARY, Library, StoredDocument
from notso.web.turns.documents import MAX_ATTACHMENT_BYTES, MAX_ATTACHMENTS
from notso.web.values.child_work import child_work
from notso.web.values.errors import Problem, StorageError
from notso.web.values.ids import is_id
from notso.web.values.wording import number, translated, words

attachments_router = APIRouter()


@attachments_router.post("/attachments", dependencies=[GUARDED])
async def read_attachment(page: Page, extension: Annotated[str, Query(max_length=10)] = "") -> JSONResponse:
    """Return the text of the document in the request body, or an error message."""
    data, shared = await page.request.body(), page.services.shared
    try:
        async with shared.documents.turn(page.owner):
            document = await child_work(
                lambda: DocumentReader(data, f"document.{extension}", shared.settings.unconfined_documents),
                DocumentReader.read,
            )
    except UnreadableError as error:
        return _problem(422, words["attach_unreadable"].format(reason=translated(error)))
    except Problem as problem:
        return _problem(problem.status, problem.sentence)
    text = document.text
    if len(text) > MAX_ATTACHMENT_BYTES or len(text.encode()) > MAX_ATTACHMENT_BYTES:
        return _problem(422, words["attach_too_long"].format(characters=number(len(text))))
    facts = _describe(document.kind, len(text), len(document.pages))
    return JSONResponse({"text": text, "facts": facts, "warnings": list(document.warnings)})


def _describe(kind: str, characters: int, pages: int) -> str:
    facts = {"kind": kind, "characters": number(characters), "pages": number(pages)}
    return (words["attach_facts"] if pages == 1 else words["attach_facts_pages"]).format(**facts)


def _problem(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"problem": sentence}, status)


router = APIRouter()

MAX_QUERY_CHARACTERS = 1000
SHOWN_HITS = 20
MAX_PAGE_CHARACTERS = 100_000


@router.get("/documents", dependencies=[GUARDED])
async def library_page(
    page: Page, q: Annotated[str, Query(max_length=MAX_QUERY_CHARACTERS)] = "", chat: str = ""
) -> Response:
    """Show the accessible documents that belong to no project, or search all accessible documents for `q`."""
    # Selected documents are attached to a question in the chat with the id `chat`, or in a new chat.
    return await render_page(
        page,
        "documents.html",
        **await documents_context(page),
        query=q,
        hits=await page.store.documents.search(page.owner, q, SHOWN_HITS) if q.strip() else [],
        asking=(await find_chat(page, chat)).id if chat else "",
    )


async def documents_context(page: PageRequest, project: Library | None = None) -> dict[str, Any]:
    store = page.store.documents
    libraries = [project] if project is not None else await store.libraries(page.owner)
    shown = {each.id for each in libraries if project is not None or not each.is_project}
    found = await store.documents(page.owner, project.id if project is not None else None)
    documents = [each for each in found if each.library_id in shown]
    return {
        "documents": documents,
        "readable_count": len(found),
        "project": project,
        "rights": {each.id: each.rights for each in libraries},
        "polling": any(each.state in ("queued", "parsing") for each in documents),
        "most": MAX_ATTACHMENTS,
        "facts": {each.id: describe_document(each) for each in documents},
    }


@router.post("/documents", dependencies=[GUARDED])
async def upload(page: Page, name: Annotated[str, Query(max_length=1000)] = "", library: str = "") -> JSONResponse:
    """Store the file in the request body and queue it for parsing. Identical content is stored once per library.

    library: id of a project, or empty for the user's own documents.
    """
    project = await find_project(page, library) if library else None
    if project is not None and project.rights == "read":
        raise Problem(403, words["error_project_rights"])
    data, store = await page.request.body(), page.store.documents
    if not data:
        return _problem(422, words["document_empty"])
    try:
        target = project or await store.library(page.owner, DEFAULT_LIBRARY)
        shown_name = display_name(name.replace("\\", "/").rpartition("/")[2])
        document = await store.add(page.owner, target.id, shown_name, data)
    except StorageError as error:
        return _problem(507, translated(error))
    return JSONResponse(_state(document), 201)


async def _find_document(page: Page, document_id: str) -> StoredDocument:
    found = await page.store.documents.some(page.owner, [document_id]) if is_id(document_id) else []
    return require(next(iter(found), None), words["document_unknown"])


FoundDocument = Annotated[StoredDocument, Depends(_find_document)]


@router.get("/documents/{document_id}/state", dependencies=[GUARDED])
async def state(document: FoundDocument) -> JSONResponse:
    return JSONResponse(_state(document))


@router.get("/documents/{document_id}", dependencies=[GUARDED])
async def show_document(
    page: Page,
    document_id: str,
    number: Annotated[int, Query(alias="page")] = 1,
    at: int = -1,
    end: int = -1,
    revision: str = "",
) -> Response:
    """Show the text of page number `page`, or of the page that contains the character with index `at`."""
    # The characters from `at` to `end` are highlighted if the document still has the given `revision`; otherwise, its
    # text has been replaced, and the citation's `page` is shown.
    document = await _find_document(page, document_id)
    text = await page.store.documents.text(page.owner, document.id)
    before, quoted, shown, pages = "", "", "", text.pages if text is not None else ()
    current = revision_of(text.text) if text is not None and revision else ""
    if at >= 0 and pages and revision == current:
        number = page_at(pages, at)
    number = min(max(1, number), max(1, len(pages)))
    if text is not None:
        begin, last = text.pages[number - 1], text.pages[number] if number < len(pages) else len(text.text)
        if begin <= at < min(end, last + MAX_QUOTE_CHARACTERS) and revision == current != "":
            before, quoted = text.text[max(begin, at - MAX_PAGE_CHARACTERS // 2) : at].lstrip(), text.text[at:end]
            begin, last = end, max(end, last)
        shown = text.text[begin:last].rstrip() if quoted else text.text[begin:last].strip()
    context: dict[str, Any] = {
        "document": document,
        "facts": describe_document(document),
        "page": number,
        "pages": len(pages),
        "before": before,
        "quoted": quoted,
        "text": shown[:MAX_PAGE_CHARACTERS],
        "is_cut": len(shown) > MAX_PAGE_CHARACTERS,
    }
    if page.is_fragment:
        return await page.respond("_document.html", part=True, **context)
    return await page.respond_with_sidebar("document.html", list_address=await _list_url(page, document), **context)


@router.get("/documents/{document_id}/file", dependencies=[GUARDED])
async def download(page: Page, document: FoundDocument) -> Response:
    name = quote(document.name.rpartition("/")[2], safe="")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    content = await page.store.documents.content(page.owner, document.id)
    return Response(content, headers=headers, media_type="application/octet-stream")


@router.get("/documents/{document_id}/pages/{page}/image", dependencies=[GUARDED])
async def page_image(page: Page, document_id: str, number: Annotated[int, Path(alias="page")]) -> Response:
    document = await _find_document(page, document_id)
    if document.state != "ready" or document.kind != "PDF" or not 1 <= number <= document.pages:
        raise Problem(404, words["document_unknown"])
    try:
        async with page.services.shared.documents.turn(page.owner):
            image = await page.services.library.page_image(page.owner, document, number)
    except UnreadableError as error:
        raise Problem(422, words["document_failed"].format(name=document.name, reason=translated(error))) from error
    return Response(image, media_type="image/png")


@router.post("/documents/{document_id}/retry", dependencies=[GUARDED])
async def retry(page: Page, _: Fields, document: FoundDocument) -> Response:
    """Parse a document again after a failure."""
    list_url = await _list_url(page, document)
    require(await page.store.documents.retry(page.owner, document.id), words["document_unknown"])
    return RedirectResponse(list_url, 303)


@router.post("/documents/{document_id}/delete", dependencies=[GUARDED])
async def delete(page: Page, _: Fields, document: FoundDocument) -> Response:
    list_url = await _list_url(page, document)
    require(await page.store.documents.delete(page.owner, document.id), words["document_unknown"])
    page.services.library.forget_images(document.id)
    return RedirectResponse(list_url, 303)


async def _list_url(page: PageRequest, document: StoredDocument) -> str:
    libraries = await page.store.documents.libraries(page.owner)
    is_in_project = any(each.id == document.library_id and each.is_project for each in libraries)
    return f"/projects/{document.library_id}" if is_in_project else "/documents"


async def load_chosen_documents(page: PageRequest, ids: Sequence[str]) -> list[StoredDocument]:
    """Return the ready documents among `ids`, at most as many as can be attached to a question."""
    found = await page.store.documents.some(page.owner, [each for each in ids if is_id(each)][:MAX_ATTACHMENTS])
    return [each for each in found if each.state == "ready"]


def describe_document(document: StoredDocument) -> str:
    return _describe(document.kind, document.characters, document.pages) if document.state == "ready" else ""


def _state(document: StoredDocument) -> dict[str, str]:
    reason = translated(unreadable(document.reason))
    reason = words["attach_unreadable"].format(reason=reason) if reason else ""
    return {
        "id": document.id,
        "name": document.name,
        "state": document.state,
        "facts": describe_document(document),
        "problem": reason,
        "note": document.note,
    }
