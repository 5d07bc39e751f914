"""Ask a question about every part of documents: send one request for each part, and join the answers in order.

With search, the model reads only a few passages, too few to count or list things. Here, it reads every part.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TypeAlias

from notso.documents.citations import replace_newlines
from notso.documents.passages import Passage, estimated_tokens, group_passages
from notso.smollm3 import Event, FixedPrefix, Message, Progress, QuoteSource
from notso.web.engine.port import ChatEngine, Request
from notso.web.engine.running import RunningRequest, RunningRequests, submissions_for
from notso.web.store.documents import DocumentText, StoredDocument
from notso.web.store.protocol import Attachment, ChatStore
from notso.web.turns.documents import USUAL_CONTEXT_TOKENS, count_tokens, prepend_attachments
from notso.web.values.wording import words

AT_ONCE = 4
MAX_PARTS = 500
MAX_PART_TOKENS = 12_000
MAX_ANSWER_TOKENS = 512
SAMPLE_CHARACTERS = 200_000
SHARE_OF_CONTEXT = 0.6  # leaves room for the question and the answer
ONLY_THIS_PART = "This is part {number} of {parts}. Answer from this part alone, and briefly."
QUOTE_PART = "After the answer, quote the passages that support it, word for word and each as [[{number}: words]]."
_COUNT = re.compile(r"[\s*_]*(\d{1,3}(?:,\d{3})+|\d{1,15})[*_]*(?:(?:\.[*_]*)?\s*(?:$|\[\[)|\s+[^\W\d_])")
"""A count at the beginning of an answer: the number alone, or before a word or a quotation. List markers such as "1.",
decimals and dates such as 2024-05-12 are not counts."""


Arrival: TypeAlias = tuple[int, list[Event] | None]
"""Index of a part, and its new events, or None if its request has ended."""


@dataclass(frozen=True, slots=True)
class DocumentPart:
    title: str
    request: Request


async def build_part_requests(
    store: ChatStore,
    owner: str,
    documents: Sequence[StoredDocument],
    following: Sequence[str],
    base: Request,
    engine: ChatEngine | None,
) -> list[DocumentPart]:
    """Return a request for each part of the documents.

    `following` has the texts that follow a part in its prompt. `base` has the chat's parameters and options. The KV
    cache of each part is pinned for the next question.
    """
    context = engine.info.context_tokens if engine is not None else USUAL_CONTEXT_TOKENS
    max_part_tokens = min(MAX_PART_TOKENS, int(SHARE_OF_CONTEXT * context))
    salts = {each.id: each.salt for each in await store.documents.libraries(owner)}
    limit = min(base.params.max_tokens or MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS)
    found: list[tuple[StoredDocument, str, str, str]] = []
    for document in documents:
        text = await store.documents.text(owner, document.id)
        if text is None:
            continue
        for passage, last_page in await asyncio.to_thread(_split_text, text, max_part_tokens, engine):
            name = title = document.name
            if document.pages > 1:
                # The name is part of the prompt. It is in English, so that the cached part can be used with all page
                # languages.
                name += f", pages {passage.page} to {last_page}"
                title += words["comma"] + words["part_pages"].format(first=passage.page, last=last_page)
            found.append((document, name, title, text.text[passage.start : passage.end]))
    parts = []
    for number, (document, name, title, part_text) in enumerate(found, start=1):
        head = f"{prepend_attachments('', (Attachment(name, part_text),))}\n\n"
        scope, reading = salts.get(document.library_id, ""), hashlib.sha256(head.encode()).hexdigest()[:32]
        await store.documents.record_reading(scope, reading, [document.id])
        only = ONLY_THIS_PART.format(number=number, parts=len(found))
        options = replace(
            base.options,
            thinking=False,
            tools=None,
            token_ids=False,
            date=date.fromisoformat(document.reading_day),
            prefix=FixedPrefix(0, len(head), scope, reading),
            # Other documents are empty sources, so that each document has the same number in all parts.
            sources=tuple(
                QuoteSource(replace_newlines(part_text) if each is document else "", each.id) for each in documents
            ),
        )
        quote = QUOTE_PART.format(number=documents.index(document) + 1)
        messages = (Message("user", head + "\n\n".join([*following[:-1], only, following[-1], quote])),)
        parts.append(
            DocumentPart(title, Request(messages, replace(base.params, max_tokens=limit), options, base.model))
        )
    return parts


def _split_text(text: DocumentText, max_tokens: int, engine: ChatEngine | None) -> list[tuple[Passage, int]]:
    # Calibrate the estimate with a sample, because its error depends on the language and the vocabulary.
    sample = text.text[:SAMPLE_CHARACTERS]
    initial_estimate = int(max_tokens * min(1.0, estimated_tokens(sample) / max(1, count_tokens(engine, sample))))
    found = list[tuple[Passage, int]]()
    unsplit: list[tuple[Sequence[Passage], int]] = [(text.passages, max(1, initial_estimate))]
    while unsplit:
        passages, estimate = unsplit.pop()
        for part, last_page in group_passages(text.text, passages, estimate):
            part_text = text.text[part.start : part.end]
            tokens = count_tokens(engine, part_text)
            part_passages = [each for each in passages if part.start <= each.start < part.end]
            if tokens <= max_tokens or len(part_passages) == 1:
                found.append((part, last_page))
            else:  # too long: some texts, such as tables, have more tokens than the sample suggests
                corrected = int(estimated_tokens(part_text) * max_tokens / tokens)
                unsplit.append((part_passages, max(1, min(estimate - 1, corrected))))
    return sorted(found, key=lambda each: each[0].start)


async def answer_parts(
    requests: RunningRequests,
    parts: Sequence[DocumentPart],
    opened: Callable[[RunningRequest], None],
    is_stopped: Callable[[], bool],
) -> AsyncIterator[Event]:
    """Send the requests, AT_ONCE at a time, and yield the events of the joined answer.

    If there are several answers and all begin with counts, the sum of the counts follows. `opened` receives each
    request, so that it can be stopped. Raises the same errors as the requests.
    """
    room = asyncio.Semaphore(AT_ONCE)
    arrived: asyncio.Queue[Arrival] = asyncio.Queue()

    async def ask(number: int, request: Request) -> None:
        try:
            async with room:
                if is_stopped():
                    arrived.put_nowait((number, [Event("end", finish_reason="cancelled")]))
                    return
                with contextlib.closing(requests.open(request.options.owner, counts=False)) as running:
                    opened(running)
                    await running.begin(submissions_for(request), model=request.model)
                    async for _, events in running.events():
                        arrived.put_nowait((number, events))
        finally:
            arrived.put_nowait((number, None))

    tasks = [asyncio.create_task(ask(number, each.request)) for number, each in enumerate(parts)]
    try:
        async for event in _join_answers(parts, tasks, arrived):
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _join_answers(
    parts: Sequence[DocumentPart], tasks: Sequence[asyncio.Task[None]], arrived: asyncio.Queue[Arrival]
) -> AsyncIterator[Event]:
    texts, progress = [""] * len(parts), dict[int, Progress]()
    ended: dict[int, Event] = {}
    shown, unfinished = 0, len(parts)
    while shown < len(parts):
        if not unfinished:
            return  # a part failed, or its request was stopped before it reached the engine
        number, events = await arrived.get()
        if events is None:
            await tasks[number]  # raises the request's error, if it failed
            unfinished -= 1
            continue
        for event in events:
            if event.kind == "text":
                texts[number] += event.text
            elif event.kind == "progress" and event.progress is not None:
                progress[number] = event.progress
                yield Event("progress", progress=_total_progress(progress.values(), len(parts)))
            elif event.kind in ("usage", "error"):
                yield event
            elif event.kind == "end":
                ended[number] = event
        while shown in ended:
            if ended[shown].finish_reason == "cancelled":
                yield ended[shown]
                return
            yield Event("text", text=f"**{parts[shown].title}**\n\n{texts[shown].strip()}\n\n")
            shown += 1
    counts = [_COUNT.match(text) for text in texts]
    if len(parts) > 1 and all(counts):
        total = sum(int(each[1].replace(",", "")) for each in counts if each is not None)
        yield Event("text", text=f"**{words['parts_total'].format(total=total)}**\n")
    yield Event("end", finish_reason="stop")


def _total_progress(values: Iterable[Progress], parts: int) -> Progress:
    progress = list(values)
    done, total, cached = (
        sum(getattr(one, name) for one in progress) for name in ("done_tokens", "total_tokens", "cached_tokens")
    )
    return Progress(done, total * parts // len(progress), cached, max(one.tokens_per_s for one in progress))
