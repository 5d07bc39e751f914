"""Documents for a question: their text, for the page to attach. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse

from notso.documents.reading import DocumentReader
from notso.documents.values import Document, UnreadableError
from notso.web.chat.services import Services
from notso.web.chat.views import Owner
from notso.web.edge.access import GUARDED
from notso.web.turns.attachments import MAX_ATTACHMENT_BYTES
from notso.web.values.child_work import child_work
from notso.web.values.errors import Problem
from notso.web.values.wording import number, words

router = APIRouter()


@router.post("/attachments", dependencies=[GUARDED])
async def read_attachment(
    request: Request, services: Services, owner: Owner, extension: Annotated[str, Query(max_length=10)] = ""
) -> JSONResponse:
    """Return the text of the document in the body, or the sentence in which it is refused (422)."""
    data = await request.body()
    try:
        async with services.documents.turn(owner):
            document = await child_work(
                lambda: DocumentReader(data, f"document.{extension}", services.shared.settings.unconfined_documents),
                DocumentReader.read,
            )
    except UnreadableError as error:
        return _problem(422, f"{error}.")
    except Problem as problem:
        return _problem(problem.status, problem.sentence)
    text = document.text
    if len(text) > MAX_ATTACHMENT_BYTES or len(text.encode()) > MAX_ATTACHMENT_BYTES:
        return _problem(422, words["attach_too_long"].format(characters=number(len(document.text))))
    return JSONResponse({"text": text, "facts": _facts(document), "warnings": list(document.warnings)})


def _facts(document: Document) -> str:
    facts: dict[str, Any] = {"kind": document.kind, "characters": number(len(document.text))}
    if len(document.pages) == 1:
        return words["attach_facts"].format(**facts)
    return words["attach_facts_pages"].format(**facts, pages=number(len(document.pages)))


def _problem(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"problem": sentence}, status)
