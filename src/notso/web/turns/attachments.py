"""Text attachments: parsing from form fields and insertion into the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from notso.documents.citations import framed
from notso.web.store.protocol import Attachment
from notso.web.values.errors import Problem
from notso.web.values.visible_text import visible_line
from notso.web.values.wording import number, words

MAX_ATTACHMENTS = 8
MAX_NAME_CHARACTERS = 120
MAX_ATTACHMENT_BYTES = 200_000
"""Of one file's text. The page checks text files itself, the server those that it reads."""


def attachments_from(fields: Mapping[str, str], max_characters: int) -> tuple[Attachment, ...]:
    """Read `file-N-name`, `file-N-text` and `file-N-document` fields. Raise Problem if they exceed a limit."""
    found = []
    for place in range(1, MAX_ATTACHMENTS + 1):
        text, document = fields.get(f"file-{place}-text", ""), fields.get(f"file-{place}-document", "")
        if not text.strip() and not document and f"file-{place}-name" not in fields:
            continue  # a named file without text is kept: the model sees that it is empty
        name = visible_line(fields.get(f"file-{place}-name", ""), MAX_NAME_CHARACTERS)
        found.append(Attachment(name or words["attachment_unnamed"].format(number=place), text.strip("\n"), document))
    if any(f"file-{MAX_ATTACHMENTS + 1}-{part}" in fields for part in ("name", "text", "document")):
        raise Problem(400, words["error_attachments"].format(limit=MAX_ATTACHMENTS))
    total = sum(len(each.text) for each in found)
    if total > max_characters:
        raise Problem(400, words["error_too_long"].format(length=number(total), limit=number(max_characters)))
    return tuple(found)


def with_attachments(text: str, attachments: tuple[Attachment, ...]) -> str:
    """Return the question below its files."""
    parts = [framed(each.name, each.text) for each in attachments]
    return "\n\n".join([*parts, text] if text else parts)
