"""Look up the quotations of a finished answer in the prompt's documents, and render them as links."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from html import escape, unescape

from notso.documents.citations import (
    QuotedSpan,
    find_claims,
    find_marked_quotes,
    find_missing_claims,
    locate_quote,
    revision_of,
)
from notso.web.edge.request_paths import base_path
from notso.web.store.documents import Citation, DocumentStore, DocumentText
from notso.web.store.protocol import StoredMessage
from notso.web.values.wording import words

MAX_CITATIONS = 256
_QUOTE_SPAN = re.compile(r'<span class="quote">(\d{1,3}): ([^<]*+)</span>')


async def locate_citations(
    store: DocumentStore, owner: str, answer: str, document_ids: Sequence[str]
) -> tuple[Citation, ...]:
    """Locate an answer's quotations, which refer by number to the documents of its prompt.

    Also returns long passages in ordinary quotation marks if they occur in none of the documents.
    """
    marks = [each for each in find_marked_quotes(answer) if each.number]
    claims = list(find_claims(answer))
    if not document_ids or not (marks or claims):
        return ()
    numbers = range(1, len(document_ids) + 1) if claims else sorted({each.number for each in marks})
    texts: dict[int, DocumentText] = {}
    for number in numbers:
        document_id = document_ids[number - 1] if number <= len(document_ids) else ""
        text = await store.text(owner, document_id) if document_id else None
        if text is not None:
            texts[number] = text

    def look_up() -> list[Citation]:
        found = []
        for mark in marks[:MAX_CITATIONS]:
            text = texts.get(mark.number)
            place = locate_quote(text.text, mark.words) if text is not None else None
            if text is None or place is None:
                found.append(Citation(mark.start, mark.end))
                continue
            document = document_ids[mark.number - 1]
            found.append(Citation(mark.start, mark.end, document, revision_of(text.text), *place))
        absent = find_missing_claims((text.text for text in texts.values()), claims)
        return sorted([*found, *(Citation(each.start, each.end) for each in absent)], key=lambda each: each.at)

    return tuple(await asyncio.to_thread(look_up))


def render_citations(html: str, message: StoredMessage, *, with_links: bool = True) -> str:
    """Replace quotations in an answer's sanitized HTML with numbered links; mark those that are in no document."""
    if '<span class="quote">' not in html and not message.citations:
        return html
    # An answer may quote the same words several times.
    cited: dict[tuple[int, str], list[tuple[int, Citation]]] = {}
    for number, (mark, each) in enumerate(_marks_with_citations(message), start=1):
        cited.setdefault((mark.number, _collapse_spaces(mark.words)), []).append((number, each))

    def render(found: re.Match[str]) -> str:
        numbered = cited.get((int(found[1]), _collapse_spaces(unescape(found[2]))))
        if numbered is None:
            return found[0]
        number, each = numbered.pop(0) if len(numbered) > 1 else numbered[0]
        if not each.document:
            return f'“{found[2]}” <span class="absent">{escape(words["citation_absent"])}</span>'
        title = escape(f"“{unescape(found[2])}” – {_format_location(each)}")
        link = f' href="{_document_url(each)}"' if with_links else ""
        return f'<a class="citation"{link} title="{title}">{number}</a>'

    absent = [message.content[each.at : each.to] for each in message.citations if not each.document]
    absent = [each for each in absent if not each.startswith("[[")]
    note = "".join(
        f'<p class="absent">{escape(words["citation_absent_quote"].format(quote=each))}</p>' for each in absent
    )
    return _QUOTE_SPAN.sub(render, html) + note


def markdown_with_citations(message: StoredMessage) -> str:
    text, notes, at = "", list[str](), 0
    for mark, each in _marks_with_citations(message):
        text += message.content[at : mark.start]
        at = mark.end
        if each.document:
            notes.append(f"[^{len(notes) + 1}]: “{mark.words}” – {_format_location(each)}")
            text += f"[^{len(notes)}]"
        else:
            text += f"“{mark.words}” ({words['citation_absent']})"
    return "\n\n".join(filter(None, (text + message.content[at:], "\n".join(notes))))


def _marks_with_citations(message: StoredMessage) -> list[tuple[QuotedSpan, Citation]]:
    marks = {each.start: each for each in find_marked_quotes(message.content)}
    return [(marks[each.at], each) for each in message.citations if each.at in marks]


def _collapse_spaces(text: str) -> str:
    return " ".join(text.split())


def _format_location(each: Citation) -> str:
    page = words["comma"] + words["document_page"].format(page=each.page) if each.page else ""
    return each.name + page


def _document_url(each: Citation) -> str:
    place = f"at={each.start}&amp;end={each.end}&amp;revision={each.revision}"
    place += f"&amp;page={each.page}" if each.page else ""
    return f"{base_path.get()}/documents/{each.document}?{place}#quoted"
