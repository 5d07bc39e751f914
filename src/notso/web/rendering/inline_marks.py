"""Inline extensions of CommonMark: bare URLs, footnote marks, quotations of documents, task list boxes.

Each depends on its own line only, so that growing text never changes a block already shown. Therefore footnotes are
not linked: their marks are only raised.
"""

from __future__ import annotations

import re
from html import escape

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline

_SCHEME = re.compile(r"(?:^|[^a-z0-9.+-])(https?)$", re.IGNORECASE)
_REST = re.compile(r"://[^\s<>\"`|\\^{}]{1,2000}")
_AFTERWARDS = ".,:;!?'*_~…。，"  # at the end of a URL these belong to the sentence

_NOTE = re.compile(r"\[\^([^\s\[\]^]{1,32})\](:?)(?!\()")
_QUOTATION = re.compile(r"\[\[(?:\d{1,3}: |none(?=\]\]))")
MAX_QUOTATION = 2_000
_BOXES = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}


def enable_inline_marks(parser: MarkdownIt) -> None:
    """Add bare URLs, the tokens `note` and `quotation`, and task list boxes to a parser."""
    parser.inline.ruler.after("text", "bare_address", _bare_address)
    parser.inline.ruler.before("link", "note", _note)
    parser.inline.ruler.before("note", "quotation", _quotation)
    parser.core.ruler.after("inline", "boxes", _boxes)


def quotation_html(label: str) -> str:
    return f'<span class="quote">{escape(label)}</span>'


def note_html(label: str) -> str:
    return f"<sup>{escape(label)}</sup>"


def _bare_address(state: StateInline, silent: bool) -> bool:
    # The text rule stops at the colon of https://..., with the scheme pending.
    if state.src[state.pos] != ":" or state.linkLevel > 0:
        return False
    scheme = _SCHEME.search(state.pending)
    rest = _REST.match(state.src, state.pos) if scheme is not None else None
    if scheme is None or rest is None:
        return False
    address = _without_end(scheme[1] + rest[0])
    target = state.md.normalizeLink(address)
    if len(address) <= len(scheme[1]) + 3 or not state.md.validateLink(target):
        return False
    if not silent:
        state.pending = state.pending[: -len(scheme[1])]
        state.push("link_open", "a", 1).attrs = {"href": target}
        state.push("text", "", 0).content = address
        state.push("link_close", "a", -1)
    state.pos += len(address) - len(scheme[1])
    return True


def _without_end(address: str) -> str:
    while address:
        last = address[-1]
        # A closing bracket stays if its opening one is in the address.
        if last not in _AFTERWARDS and not _closes_nothing(address):
            break
        address = address[:-1]
    return address


def _closes_nothing(address: str) -> bool:
    opening = {")": "(", "]": "["}.get(address[-1])
    return opening is not None and address.count(address[-1]) > address.count(opening)


def _note(state: StateInline, silent: bool) -> bool:
    found = _NOTE.match(state.src, state.pos)
    if found is None:
        return False
    # The definition `[^1]:` at the beginning of a line includes its colon.
    begins = not state.src[: state.pos].rpartition("\n")[2].strip()
    if not silent:
        state.push("note", "", 0).content = found[1]
    state.pos = found.end(2) if begins else found.end(1) + 1
    return True


def _quotation(state: StateInline, silent: bool) -> bool:
    # Its number and its words, which are no Markdown; pages draw it where the words were found.
    found = _QUOTATION.match(state.src, state.pos)
    end = -1 if found is None else state.src.find("]]", found.end(), found.end() + MAX_QUOTATION)
    if found is None or end < 0:
        return False
    if not silent and end > found.end():
        state.push("quotation", "", 0).content = state.src[state.pos + 2 : end]
    state.pos = end + 2
    return True


def _boxes(state: StateCore) -> None:
    for item, paragraph, inline in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if item.type != "list_item_open" or paragraph.type != "paragraph_open" or not inline.children:
            continue
        first = inline.children[0]
        box = _BOXES.get(first.content[:4]) if first.type == "text" else None
        if box is not None:
            first.content = box + first.content[4:]
            item.attrSet("class", "task")
