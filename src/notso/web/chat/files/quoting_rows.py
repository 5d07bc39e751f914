"""Generate training rows that teach a model to quote a document before it answers.

Prompts look like those of chats with documents: they contain passages as attachments or as search results.
Answers quote a sentence of the passages and then use it, or say that the passages do not mention the subject.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from notso.documents.citations import QUOTE_FIRST, replace_newlines, revision_of
from notso.web.store.documents import DocumentText
from notso.web.store.protocol import Attachment
from notso.web.turns.documents import PASSAGES_FOLLOW, prepend_attachments

LEAST_WORDS, MOST_WORDS = 6, 40
"""Length of a quoted sentence in words; the engine limits quotations to 60 words."""
SHOWN = 3
"""Maximum number of passages in a prompt."""
ABSENT_EVERY = 5
"""One question in ABSENT_EVERY asks about something that is not in the passages."""
GAP = "____"

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\n+")
_WORD = re.compile(r"\w[\w'’-]*\w")


def quoting_rows(name: str, document: DocumentText, most: int) -> Iterator[dict[str, Any]]:
    """Yield up to `most` rows for a document, always the same; none if no sentence is suitable."""
    rng = random.Random(f"{name} {revision_of(document.text)}")
    sentences = [
        (at, sentence)
        for at, passage in enumerate(document.passages)
        for sentence in _sentences(document.text[passage.start : passage.end])
    ]
    rng.shuffle(sentences)
    number = 0
    for at, sentence in sentences:
        others = [each for each in range(len(document.passages)) if each != at]
        chosen = sorted([at, *rng.sample(others, min(SHOWN - 1, len(others)))])
        pair = _question(sentence, rng)
        if pair is None:
            continue
        question, answer = pair
        answer = f"[[1: {sentence}]]\n\n{answer}"
        if number % ABSENT_EVERY == ABSENT_EVERY - 1 and others:
            chosen = sorted(rng.sample(others, min(SHOWN, len(others))))
            text = replace_newlines(" ".join(_passage_texts(document, chosen))).casefold()
            subject = _subject(sentence, rng)
            if subject.casefold() in text:
                continue
            question, answer = _question_about(subject), f"[[none]]\n\nNothing here mentions “{subject}”."
        number += 1
        head = _head(name, document, chosen, as_attachment=number % 2 == 0)
        content = "\n\n".join([head, question, QUOTE_FIRST])
        yield {
            "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if number == most:
            return


def _head(name: str, document: DocumentText, chosen: Sequence[int], *, as_attachment: bool) -> str:
    if as_attachment:
        return prepend_attachments("", (Attachment(name, "\n\n".join(_passage_texts(document, chosen))),))
    parts = []
    for at, text in zip(chosen, _passage_texts(document, chosen), strict=True):
        page = f", page {document.passages[at].page}" if len(document.pages) > 1 else ""
        parts.append(f"[{name}{page}]\n{text}")
    return "\n\n".join([PASSAGES_FOLLOW.format(documents="the document"), *parts])


def _passage_texts(document: DocumentText, chosen: Sequence[int]) -> list[str]:
    passages = [document.passages[each] for each in chosen]
    return [document.text[each.start : each.end] for each in passages]


def _sentences(passage: str) -> Iterator[str]:
    for part in _SENTENCE_END.split(passage):
        sentence = replace_newlines(part).strip()
        is_whole = sentence[:1].isalnum() and sentence[-1:] in ".!?"
        if is_whole and "]" not in sentence and LEAST_WORDS <= len(_WORD.findall(sentence)) <= MOST_WORDS:
            yield sentence


def _question(sentence: str, rng: random.Random) -> tuple[str, str] | None:
    words = [each for each in _WORD.finditer(sentence) if each.start() > 0 and len(each[0]) > 3]
    if not words:
        return None
    if rng.random() < 0.5:
        return _question_about(_subject(sentence, rng)), sentence
    numbers = [each for each in _WORD.finditer(sentence) if any(map(str.isdigit, each[0])) and each.start() > 0]
    gap = rng.choice(numbers or words)
    blanked = f"{sentence[: gap.start()]}{GAP}{sentence[gap.end() :]}"
    return f"Which word is missing? “{blanked}”", gap[0]


def _subject(sentence: str, rng: random.Random) -> str:
    words = list(_WORD.finditer(sentence))
    pairs = list(itertools.pairwise(words))
    first, second = rng.choices(pairs, [len(a[0]) * len(b[0]) for a, b in pairs])[0]
    return sentence[first.start() : second.end()]


def _question_about(subject: str) -> str:
    return f"What do the documents say about “{subject}”?"
