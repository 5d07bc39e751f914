"""Malicious documents end with a one-sentence error or as harmless text, and nothing is written or downloaded."""

from __future__ import annotations

import io
import re

import pytest
from documents.traps import BOMBS, SECRET, TRAPS

from notso.documents import child
from notso.documents.reading import DocumentReader, assemble_document, parse_frames
from notso.documents.values import Document, UnreadableError

HURRIED = """
from dataclasses import replace
from notso.documents import child
child.LIMITS = replace(child.LIMITS, cpu_s=1, more_cpu_s=0, memory_bytes=512 << 20)
child.main()
"""
"""The child's program with less time and memory, so that bombs end early."""


def read_here(data: bytes, name: str) -> Document:
    """Read a document in this process, without sandboxing."""
    output = io.BytesIO()
    child.write_document_frames(io.BytesIO(data), output, name.rpartition(".")[2], [], lambda: None)
    return assemble_document(parse_frames(iter([output.getvalue()])), lambda seconds: None)


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_document_gives_one_sentence_error_or_harmless_text(trap: str) -> None:
    name, content, sentence = TRAPS[trap]
    try:
        document = read_here(content(), name)
    except UnreadableError as error:
        assert sentence and re.match(sentence, str(error)), str(error)
        assert len(str(error)) < 120 and "\n" not in str(error)
    else:
        assert re.fullmatch(sentence, "") is not None, f"the document was read: {document.text[:80]!r}"
        assert document.text.strip() and SECRET not in document.text
        assert not re.search("[\0-\x08\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]", document.text)


@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_document_ends_within_child_limits(bomb: str) -> None:
    name, content, sentence = BOMBS[bomb]
    with pytest.raises(UnreadableError, match=sentence):  # also without Landlock or seccomp
        DocumentReader(content(), name, unconfined=True, program=HURRIED).read()


def test_trap_collection_has_at_least_60_documents() -> None:
    assert len(TRAPS) + len(BOMBS) >= 60
