"""The file_search tool: the last question is searched for in vector stores, and its passages precede it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from notso.documents.citations import Mark
from notso.documents.passages import estimated_tokens
from notso.smollm3 import Message
from notso.web.api.responses.fields import USUAL_RESULTS
from notso.web.api.responses.request import ResponseRequest
from notso.web.api.shared.given_documents import GivenDocument, GivenDocuments
from notso.web.api.shared.services import ApiServices
from notso.web.api.shared.vector_search import file_ids_of, found_library, hits_in, result_of
from notso.web.turns.documents import MAX_PASSAGE_TOKENS, NOTHING_FOUND, PASSAGES_FOLLOW

MAX_QUERY_CHARACTERS = 2_000


async def with_passages(services: ApiServices, owner: str, asked: ResponseRequest) -> ResponseRequest:
    """Return a request whose last question follows the passages found for it.

    Raises ApiError (404) for an unknown vector store.
    """
    search, messages = asked.search, asked.messages
    at = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
    if search is None or at < 0:
        return replace(asked, search=None)
    tool = search.tool
    names = dict.fromkeys(tool.vector_store_ids)
    param = "tools.vector_store_ids"
    libraries = [await found_library(services, owner, each, param) for each in names]
    query = messages[at].content[:MAX_QUERY_CHARACTERS]
    most = tool.max_num_results or USUAL_RESULTS
    hits = await hits_in(services, owner, libraries, [query], most, tool.ranking_options)
    file_ids = await file_ids_of(services, owner, (each.document for each in hits))
    documents, parts, room = GivenDocuments(), list[str](), MAX_PASSAGE_TOKENS
    for hit in hits:
        room -= estimated_tokens(hit.text)
        if room < 0 and parts:
            break
        facts = {"file_id": file_ids[hit.document.id], "filename": hit.document.name}
        is_quoted = asked.options.grammar is None
        parts.append(documents.add(GivenDocument(hit.document.name, hit.text, is_quoted, facts=facts)))
    count = len({each.document.id for each in hits})
    named = "the document" if count == 1 else f"{count} documents" if count else "the documents"
    passages = (PASSAGES_FOLLOW if parts else NOTHING_FOUND).format(documents=named)
    question = replace(messages[at], content="\n\n".join([passages, *parts, messages[at].content]))
    results = tuple(result_of(hit, file_ids[hit.document.id]) for hit in hits[: len(parts)])
    before: tuple[Message, ...] = (*messages[:at], question, *messages[at + 1 :])
    return replace(
        asked,
        prompts=(documents.asking(before),),
        options=documents.options(asked.options),
        search=replace(search, queries=(query,), results=results, documents=documents),
    )


def annotation_of(given: GivenDocuments, mark: Mark, index: int) -> Mapping[str, Any] | None:
    """Return a quotation as an annotation at character `index` of the text, or None where it is in no passage."""
    found = given.found(mark.number, mark.words)
    return None if found is None else {"type": "file_citation", "index": index, **found[0].facts}
