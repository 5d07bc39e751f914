"""Insert documents into prompts.

If the documents fit in the context, they are inserted whole. Those of the first question, or of all messages that a
summary replaces, become the "head" of the prompt; those of a later question precede that question. If the documents do
not fit, only passages that match the last question, and their neighbors, are inserted before it.

In a project, the head consists of the project's documents and instructions, and documents attached to questions stay in
the questions. A head is the same in every chat that begins with its documents, because everything that differs between
chats comes after the head. The head's date is fixed, too: the date of its first document. The engine therefore computes
the head once and pins its KV cache.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from notso.documents.citations import QUOTE_FIRST, format_for_prompt, replace_newlines
from notso.documents.passages import estimated_tokens
from notso.documents.values import READER_VERSION
from notso.smollm3 import FixedPrefix, Message, QuoteSource, RequestOptions
from notso.web.engine.port import ChatEngine
from notso.web.store.documents import DocumentStore, DocumentText, Library, PassageHit, StoredDocument
from notso.web.store.protocol import Attachment, ChatStore, StoredMessage
from notso.web.values.errors import Problem
from notso.web.values.visible_text import sanitize_line
from notso.web.values.wording import number as written
from notso.web.values.wording import words

MAX_PASSAGE_TOKENS = 3_000
MAX_PASSAGES = 12
SHARE_FOR_PASSAGES = 0.35  # largest share of the context that passages may take up
LEAST_FREE_TOKENS = 2_048
"""Whole documents leave at least this many tokens, and at least a quarter of the context, to the conversation."""
USUAL_CONTEXT_TOKENS = 8_192
NOTHING_FOUND = "Nothing in {documents} mentions the words of this question."
APART = "]]"
"""Separates the passages of a source. It ends a quotation, so that no quotation can span two passages."""
PASSAGES_FOLLOW = "Passages of {documents} that mention words of the question:"


@dataclass(frozen=True, slots=True)
class PromptDocuments:
    """Text that documents add to a chat's prompt.

    `head` precedes the first question, and `after_head` follows the head. `scope` and `reading` (an id) identify the
    head's KV cache; `day` is the head's date. `texts` maps the ids of documents attached to later questions to their
    texts. `passages` precede the last question. `instructions` are the project's, if there is no head. `sources` are
    the texts that the answer may quote.
    """

    head: str = ""
    scope: str = ""
    reading: str = ""
    day: date | None = None
    after_head: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    passages: str = ""
    instructions: str = ""
    sources: tuple[QuoteSource, ...] = ()

    def user_text(self, message: StoredMessage, *, is_last: bool) -> str:
        files = (
            replace(each, text=self.texts[each.document]) if each.document in self.texts else each
            for each in message.attachments
        )
        shown = tuple(each for each in files if not each.document or each.document in self.texts)
        text = prepend_attachments(message.content, shown)
        passages = self.passages if is_last else ""
        return "\n\n".join(filter(None, (passages, text, QUOTE_FIRST if self.sources else "")))

    def with_head(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages. If there is a head, put it and the system prompt at the start of the first question."""
        if not self.head:
            return tuple(messages)
        system = [each.content for each in messages if each.role == "system"]
        others = [each for each in messages if each.role != "system"]
        at = next((at for at, each in enumerate(others) if each.role == "user"), None)
        first = others.pop(at).content if at is not None else ""
        content = self.head + "\n\n".join(filter(None, (self.after_head, *system, first)))
        others.insert(at or 0, Message("user", content))
        return tuple(others)

    def options(self, messages: Sequence[Message], options: RequestOptions) -> RequestOptions:
        """Return the options with the head as the messages' fixed prefix, and with the quotable sources."""
        options = replace(options, sources=self.sources)
        at = next((at for at, each in enumerate(messages) if self.head and each.content.startswith(self.head)), None)
        if at is None:
            return options
        prefix = FixedPrefix(at, len(self.head), self.scope, self.reading)
        return replace(options, date=self.day, prefix=prefix)


NO_DOCUMENTS = PromptDocuments()


async def prompt_documents(
    store: ChatStore,
    owner: str,
    chat_day: date,
    line: Sequence[StoredMessage],
    above: Sequence[Attachment] = (),
    engine: ChatEngine | None = None,
    project: Library | None = None,
) -> PromptDocuments:
    """Return the text that the documents of a chat's branch and project add to its prompt.

    `above` has the attachments of messages that precede `line`. Without an engine, token counts are estimated.
    """
    instructions = project.instructions.strip() if project is not None else ""
    instructions_only = PromptDocuments(instructions=instructions) if instructions else NO_DOCUMENTS
    head_ids, later_ids = await _find_ids(store.documents, owner, line, above, project)
    ids = list(dict.fromkeys([*head_ids, *later_ids]))
    found = await store.documents.some(owner, ids) if ids else []
    ready = {each.id: each for each in found if each.state == "ready"}
    documents = [ready[each] for each in ids if each in ready]
    if not documents:
        return instructions_only
    outdated = [each.id for each in documents if each.reader < READER_VERSION]
    if outdated and not store.read_only:
        await store.documents.reread(outdated)  # takes effect for later questions
    context = engine.info.context_tokens if engine is not None else USUAL_CONTEXT_TOKENS
    # Documents at the head are a fixed prefix. The engine may support a longer context for a fixed prefix.
    max_tokens = max(engine.info.document_tokens if engine is not None and ready.keys() & set(head_ids) else 0, context)
    free_tokens = max_tokens - max(LEAST_FREE_TOKENS, max_tokens // 4)
    texts = await _texts_that_fit(store.documents, owner, documents, free_tokens, engine)
    if texts is None:
        question = next((each.content for each in reversed(line) if each.role == "user"), "")
        max_passage_tokens = min(MAX_PASSAGE_TOKENS, int(SHARE_FOR_PASSAGES * context))
        passages = await _passages(store.documents, owner, question, documents, max_passage_tokens, engine)
        return replace(instructions_only, passages=passages.passages, sources=passages.sources)
    head = [each for each in documents if each.id in head_ids]
    if not head:
        return replace(instructions_only, texts=texts, sources=_sources(texts))
    scope, reading = await _record_reading(store.documents, owner, head, instructions)
    shown = [prepend_attachments("", (Attachment(each.name, texts[each.id]),)) for each in head]
    return PromptDocuments(
        head="\n\n".join([*shown, *filter(None, [instructions]), ""]),
        scope=scope,
        reading=reading,
        day=date.fromisoformat(head[0].reading_day),
        after_head=f"Today is {chat_day.isoformat()}.",
        texts={each: text for each, text in texts.items() if each not in head_ids},
        sources=_sources({each: texts[each] for each in [*head_ids, *later_ids] if each in texts}),
    )


async def _find_ids(
    store: DocumentStore,
    owner: str,
    line: Sequence[StoredMessage],
    above: Sequence[Attachment],
    project: Library | None,
) -> tuple[list[str], list[str]]:
    # Returns the ids of the documents at the head, and of those attached to later questions.
    def ids_in(messages: Sequence[StoredMessage]) -> list[str]:
        return [each.document for message in messages for each in message.attachments if each.document]

    earlier = [each.document for each in above if each.document]
    if project is not None:
        return [each.id for each in await store.documents(owner, project.id)], [*earlier, *ids_in(line)]
    if earlier:
        return earlier, ids_in(line)
    later = next((at for at, each in enumerate(line, start=1) if each.role == "user"), 0)
    return ids_in(line[:later]), ids_in(line[later:])


async def _record_reading(
    store: DocumentStore, owner: str, head: Sequence[StoredDocument], instructions: str
) -> tuple[str, str]:
    # Returns the scope and the id of the head's KV cache.
    salts = {each.id: each.salt for each in await store.libraries(owner)}
    scope = "+".join(sorted({salts[each.library_id] for each in head if each.library_id in salts}))
    versions = (f"{each.id}/{each.reader}" if each.reader else each.id for each in head)
    identity = " ".join([*versions, *filter(None, [instructions])])
    reading = hashlib.sha256(identity.encode()).hexdigest()[:32]
    await store.record_reading(scope, reading, [each.id for each in head])
    return scope, reading


def _sources(texts: Mapping[str, str]) -> tuple[QuoteSource, ...]:
    return tuple(QuoteSource(replace_newlines(text), document) for document, text in texts.items())


async def _texts_that_fit(
    store: DocumentStore, owner: str, documents: Iterable[StoredDocument], free_tokens: int, engine: ChatEngine | None
) -> dict[str, str] | None:
    texts: dict[str, str] = {}
    for each in documents:
        if each.characters > free_tokens * 16:  # too long even at 16 characters per token: do not load the text
            return None
        found = await store.text(owner, each.id)
        texts[each.id] = found.text if found is not None else ""
        if estimated_tokens(texts[each.id]) > 2 * free_tokens:
            return None
        free_tokens -= await asyncio.to_thread(count_tokens, engine, texts[each.id])
        if free_tokens < 0:
            return None
    return texts


def count_tokens(engine: ChatEngine | None, text: str) -> int:
    """Return the number of tokens in a text, or an estimate if no model is loaded. Blocks."""
    return len(engine.tokenize(text)) if engine is not None else estimated_tokens(text)


async def _passages(
    store: DocumentStore,
    owner: str,
    question: str,
    documents: Sequence[StoredDocument],
    most_tokens: int,
    engine: ChatEngine | None,
) -> PromptDocuments:
    hits = await store.search(owner, question, MAX_PASSAGES, document_ids=[each.id for each in documents])
    description = "the document" if len(documents) == 1 else f"{len(documents)} documents"
    if not hits:
        return PromptDocuments(passages=NOTHING_FOUND.format(documents=description))
    texts: dict[str, DocumentText] = {}
    for each in documents:
        if any(hit.document.id == each.id for hit in hits) and (text := await store.text(owner, each.id)) is not None:
            texts[each.id] = text
    chosen = await asyncio.to_thread(_with_neighbors, hits, texts, most_tokens, engine)
    parts, quoted = [], dict[str, str]()
    for each in documents:
        for _, number in sorted(place for place in chosen if place[0] == each.id):
            text = texts[each.id]
            passage = text.passages[number]
            page = f", page {passage.page}" if each.pages > 1 else ""
            passage_text = text.text[passage.start : passage.end]
            parts.append(f"[{each.name}{page}]\n{passage_text}")
            quoted[each.id] = f"{quoted[each.id]} {APART} {passage_text}" if each.id in quoted else passage_text
    return PromptDocuments(
        passages="\n\n".join([PASSAGES_FOLLOW.format(documents=description), *parts]), sources=_sources(quoted)
    )


def _with_neighbors(
    hits: Sequence[PassageHit], texts: Mapping[str, DocumentText], most_tokens: int, engine: ChatEngine | None
) -> set[tuple[str, int]]:
    # Chooses hits by rank, and then passages next to hits, until one does not fit.
    found = [(hit.document.id, hit.number) for hit in hits]
    neighbors = [(each, number + step) for each, number in found for step in (1, -1)]
    chosen: set[tuple[str, int]] = set()
    free_tokens = most_tokens
    for each, number in [*found, *neighbors]:
        text = texts.get(each)
        if text is None or not 0 <= number < len(text.passages) or (each, number) in chosen:
            continue
        passage = text.passages[number]
        free_tokens -= count_tokens(engine, text.text[passage.start : passage.end])
        if free_tokens < 0:
            break
        chosen.add((each, number))
    return chosen


MAX_ATTACHMENTS = 8
MAX_NAME_CHARACTERS = 120
MAX_ATTACHMENT_BYTES = 200_000
"""Maximum size of a text attachment. The page enforces it for text files, and the server enforces it for parsed files
and MCP content."""


def parse_attachments(fields: Mapping[str, str], max_characters: int) -> tuple[Attachment, ...]:
    """Parse the fields `file-N-name`, `file-N-text` and `file-N-document`. Raises Problem if they exceed a limit."""
    found = []
    for number in range(1, MAX_ATTACHMENTS + 1):
        text, document = fields.get(f"file-{number}-text", ""), fields.get(f"file-{number}-document", "")
        if not text.strip() and not document and f"file-{number}-name" not in fields:
            continue  # no such file; an empty file with a name is kept, so that the model sees that it is empty
        name = sanitize_line(fields.get(f"file-{number}-name", ""), MAX_NAME_CHARACTERS)
        found.append(Attachment(name or words["attachment_unnamed"].format(number=number), text.strip("\n"), document))
    if any(f"file-{MAX_ATTACHMENTS + 1}-{part}" in fields for part in ("name", "text", "document")):
        raise Problem(400, words["error_attachments"].format(limit=MAX_ATTACHMENTS))
    total = sum(len(each.text) for each in found)
    if total > max_characters:
        raise Problem(400, words["error_too_long"].format(length=written(total), limit=written(max_characters)))
    return tuple(found)


def prepend_attachments(text: str, attachments: tuple[Attachment, ...]) -> str:
    parts = [format_for_prompt(each.name, each.text) for each in attachments]
    return "\n\n".join([*parts, text] if text else parts)
