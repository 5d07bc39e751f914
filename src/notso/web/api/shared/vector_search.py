"""Search document libraries, which OpenAI's API calls vector stores."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from notso.web.api.request_fields.fields import Fields, Label, Notes, hint, notes_in, works
from notso.web.api.shared.services import ApiServices
from notso.web.edge.errors import ApiError
from notso.web.store.documents import Library, PassageHit, StoredDocument

MAX_RESULTS = 50
HALF_SCORE = 8.0
"""BM25 score that the API reports as 0.5. Reported scores are between 0 and 1."""


class RankingOptions(Fields):
    """Ranking options of a search."""

    ranker: Annotated[Label | None, hint("passages are ranked by BM25", "`auto`, `none`", done=("auto", "none"))] = None
    score_threshold: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        works("minimum score of a passage, 0 to 1; a BM25 score s counts as s / (s + 8)"),
    ] = None
    hybrid_search: Annotated[dict[str, Any] | None, hint("there are no embeddings; passages are ranked by BM25")] = None


RANKING_NOTES: Notes = notes_in(RankingOptions)


async def get_library(
    services: ApiServices,
    owner: str,
    store_id: str,
    param: str = "vector_store_id",
    rights: Sequence[str] = ("own", "add", "read"),
) -> Library:
    """Return a library by vector store id. Raises ApiError: 404 if unknown, 403 if the owner has none of `rights`."""
    for each in await services.shared.store.documents.libraries(owner):
        if store_id_of(each.id) == store_id:
            if each.rights not in rights:
                raise ApiError(403, "forbidden", "this vector store belongs to another user", param=param)
            return each
    raise ApiError(404, "not_found", "there is no vector store with that id", param=param)


async def search_libraries(
    services: ApiServices,
    owner: str,
    libraries: Sequence[Library],
    queries: Sequence[str],
    limit: int,
    ranking: RankingOptions | None,
) -> list[PassageHit]:
    """Return at most `limit` passages, without duplicates: those that best match any query."""
    min_score = ranking.score_threshold or 0.0 if ranking is not None else 0.0
    hits: dict[tuple[str, int], PassageHit] = {}
    for library in libraries:
        for query in queries:
            for hit in await services.shared.store.documents.search(owner, query, limit, library_id=library.id):
                key = hit.document.id, hit.number
                if _relevance(hit) >= min_score and (key not in hits or hits[key].score < hit.score):
                    hits[key] = hit
    return sorted(hits.values(), key=lambda hit: (-hit.score, hit.document.id, hit.number))[:limit]


def to_search_result(hit: PassageHit, file_id: str) -> dict[str, Any]:
    return {
        "file_id": file_id,
        "filename": hit.document.name,
        "score": round(_relevance(hit), 4),
        "attributes": {},
        "text": hit.text,
    }


async def map_file_ids(services: ApiServices, owner: str, documents: Iterable[StoredDocument]) -> dict[str, str]:
    """Map document ids to file ids, or to derived ids if there is no file."""
    uploaded = [each.id for each in await services.shared.store.records.files(owner)]
    found = list(documents)

    def file_ids() -> dict[str, str]:
        return {document_id_of(name, each): name for each in {each.library_id for each in found} for name in uploaded}

    # A thread computes the digests, because there may be a thousand files.
    known = await asyncio.to_thread(file_ids)
    return {each.id: known.get(each.id, f"file-{each.id}") for each in found}


def store_id_of(library_id: str) -> str:
    return f"vs_{library_id.replace('-', '')}"


def document_id_of(file_id: str, library_id: str) -> str:
    """Return the id of the document that a library creates from a file."""
    # Derived from both ids, because a file may be in several libraries.
    return str(uuid.uuid5(uuid.UUID(library_id), file_id))


def _relevance(hit: PassageHit) -> float:
    return hit.score / (hit.score + HALF_SCORE)
