"""Documents attached to a question: the server extracts the text, and the page attaches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from documents.made import docx, paragraph, text_pdf
from scripted_engine import ScriptedEngine, say

from notso.web.turns.documents import parse_attachments

REFUSED = [
    (b"\x89PNG\r\n", "png", "is an image, which cannot be read."),
    (b"%PDF-1.7", "pdf", "is damaged: it is not a complete PDF."),
    (b"", "pdf", "is empty."),
    (docx(paragraph("x" * 200_001)), "docx", "has 200,001 characters; at most 200 kB of text can be attached."),
]


def test_attachment_text_is_extracted_or_rejected_with_one_sentence(start: Callable[..., Any]) -> None:
    client = start(ScriptedEngine(lambda messages, thinking: say("an answer"))).ready().client

    def posted(data: bytes, extension: str) -> Any:
        return client.post(f"/attachments?extension={extension}", content=data)

    found = posted(text_pdf(["first page"], ["second"]), "pdf").json()
    assert found["text"] == "first page\n\nsecond" and found["warnings"] == []
    assert found["facts"] == "PDF, 2 pages, 18 characters"
    assert posted(docx(paragraph("one")), "docx").json()["facts"] == "DOCX, 3 characters"
    for data, extension, sentence in REFUSED:
        answer = posted(data, extension)
        assert (answer.status_code, answer.json()) == (422, {"problem": sentence})
    assert posted(bytes((16 << 20) + 1), "pdf").status_code == 413


def test_attachment_name_replaces_control_and_bidi_characters() -> None:
    (attachment,) = parse_attachments({"file-1-name": "a\u202egpj\0.\nexe", "file-1-text": "x"}, 100)
    assert attachment.name == "a gpj . exe"
