"""Parse the extensions of CommonMark that language models commonly use.

Block extensions are <details> and alerts. Inline extensions are bare URLs, footnote marks, document quotations, task
list boxes, some HTML tags without attributes, and emphasis next to Chinese, Japanese and Korean text.

A block extension is recognized by its first line, and an inline extension depends only on its block. Therefore, text
that arrives later never changes a complete block. For the same reason, footnote marks are superscripts without links.
"""

from __future__ import annotations

import re
from html import escape

from markdown_it import MarkdownIt
from markdown_it.common.utils import isMdAsciiPunct, isPunctChar, isWhiteSpace
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Delimiter, Scanned

from notso.web.values.wording import language, language_table, words

_SCHEME = re.compile(r"(?:^|[^a-z0-9.+-])(https?)$", re.IGNORECASE)
_REST = re.compile(r"://[^\s<>\"`|\\^{}]{1,2000}")
_TRAILING_PUNCTUATION = ".,:;!?'*_~…。，"  # at the end of a URL, these characters belong to the sentence

_NOTE = re.compile(r"\[\^([^\s\[\]^]{1,32})\](:?)(?!\()")
_QUOTATION = re.compile(r"\[\[(?:\d{1,3}: |none(?=\]\]))")
MAX_QUOTATION = 2_000
_BOXES = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}


def _bare_url(state: StateInline, silent: bool) -> bool:
    # markdown-it's rule for text stops at the colon of https://...; at that point, the scheme is in `state.pending`.
    if state.src[state.pos] != ":" or state.linkLevel > 0:
        return False
    scheme = _SCHEME.search(state.pending)
    rest = _REST.match(state.src, state.pos) if scheme is not None else None
    if scheme is None or rest is None:
        return False
    address = _strip_trailing_punctuation(scheme[1] + rest[0])
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


def _strip_trailing_punctuation(address: str) -> str:
    while address:
        last = address[-1]
        if last not in _TRAILING_PUNCTUATION and not _is_unmatched_bracket(address):
            break
        address = address[:-1]
    return address


def _is_unmatched_bracket(address: str) -> bool:
    opening = {")": "(", "]": "["}.get(address[-1])
    return opening is not None and address.count(address[-1]) > address.count(opening)


def _footnote_mark(state: StateInline, silent: bool) -> bool:
    found = _NOTE.match(state.src, state.pos)
    if found is None:
        return False
    # At the start of a line, a colon after the mark belongs to a footnote definition (`[^1]:`) and is dropped.
    begins = not state.src[: state.pos].rpartition("\n")[2].strip()
    if not silent:
        state.push("note", "", 0).content = found[1]
    state.pos = found.end(2) if begins else found.end(1) + 1
    return True


def _quotation(state: StateInline, silent: bool) -> bool:
    # Quoted words are plain text from a document, not Markdown, so they are not parsed.
    found = _QUOTATION.match(state.src, state.pos)
    end = -1 if found is None else state.src.find("]]", found.end(), found.end() + MAX_QUOTATION)
    if found is None or end < 0:
        return False
    if not silent and end > found.end():
        state.push("quotation", "", 0).content = state.src[state.pos + 2 : end]
    state.pos = end + 2
    return True


def _task_list_boxes(state: StateCore) -> None:
    for item, paragraph, inline in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if item.type != "list_item_open" or paragraph.type != "paragraph_open" or not inline.children:
            continue
        first = inline.children[0]
        box = _BOXES.get(first.content[:4]) if first.type == "text" else None
        if box is not None:
            first.content = box + first.content[4:]
            item.attrSet("class", "task")


INERT_TAGS = ("sub", "sup", "kbd", "mark", "ins")
ALERTS = ("note", "tip", "important", "warning", "caution")

_WORDS = language_table("en")  # stored HTML has English labels; see `translate_labels`
_TAG = re.compile(rf"<(?:br\s*+/?|/?(?:{'|'.join(INERT_TAGS)}))\s*+>", re.IGNORECASE)
_COMMENT = re.compile(r"<!--(?!-?>).{0,1000}?-->", re.DOTALL)
_DETAILS = re.compile(r"\s*<details(?:\s+open)?>\s*(?:<summary>(.*?)</summary>\s*)?$", re.IGNORECASE)
_SUMMARY = re.compile(r"\s*<summary>(.*?)</summary>\s*$", re.IGNORECASE)
_END_OF_DETAILS = re.compile(r"\s*</details>\s*$", re.IGNORECASE)
_ALERT = re.compile(rf"\[!({'|'.join(ALERTS)})\][ \t]*(?:\n|$)", re.IGNORECASE)
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u303f\u3040-\u30ff\u3100-\u31ff\u3200-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff"
    "\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)


def enable_extensions(parser: MarkdownIt) -> None:
    parser.inline.ruler.after("text", "bare_address", _bare_url)
    parser.inline.ruler.before("link", "note", _footnote_mark)
    parser.inline.ruler.before("note", "quotation", _quotation)
    parser.core.ruler.after("inline", "boxes", _task_list_boxes)
    parser.inline.ruler.before("html_inline", "inert_html", _inert_html)
    parser.inline.ruler.at("emphasis", _emphasis)
    parser.block.ruler.before("fence", "details", _details, {"alt": ["paragraph", "blockquote", "list", "table"]})
    parser.core.ruler.before("inline", "alerts", _alerts)


def alert_title(kind: str) -> str:
    return f'<p class="alert-title">{escape(_WORDS["alert_" + kind])}</p>\n'


def _inert_html(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] != "<":
        return False
    found = _TAG.match(state.src, state.pos) or _COMMENT.match(state.src, state.pos)
    if found is None:
        return False
    if not silent and not found[0].startswith("<!--"):
        state.push("html_inline", "", 0).content = found[0].lower()
    state.pos = found.end()
    return True


def _details(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if state.is_code_block(start):
        return False
    opening = _DETAILS.match(_line(state, start))
    if opening is None:
        return False
    if silent:
        return True
    first, title = start + 1, opening[1]
    if title is None and first < end and (summary := _SUMMARY.match(_line(state, first))):
        first, title = first + 1, summary[1]
    last, depth = first, 1
    while last < end:
        depth += 1 if _DETAILS.match(_line(state, last)) else -1 if _END_OF_DETAILS.match(_line(state, last)) else 0
        # In a list item, a less indented line other than </details> ends both the item and <details>.
        if not depth or (state.sCount[last] < state.blkIndent and not state.isEmpty(last)):
            break
        last += 1
    after = last if depth else last + 1
    opened = state.push("details_open", "details", 1)
    opened.block, opened.map = True, [start, after]
    state.push("summary_open", "summary", 1)
    inline = state.push("inline", "", 0)
    inline.content, inline.map, inline.children = (title or _WORDS["details"]).strip(), [start, first], []
    state.push("summary_close", "summary", -1)
    # Parse only the lines between the opening and the closing tag.
    outside, kind = state.lineMax, state.parentType
    state.lineMax, state.parentType = last, "root"
    state.md.block.tokenize(state, first, last)
    state.lineMax, state.parentType = outside, kind
    state.push("details_close", "details", -1).block = True
    state.line = after
    return True


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _alerts(state: StateCore) -> None:
    for quote, paragraph, inline in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if quote.type != "blockquote_open" or paragraph.type != "paragraph_open" or inline.type != "inline":
            continue
        found = _ALERT.match(inline.content)
        if found is not None:
            quote.meta["alert"] = found[1].lower()
            inline.content = inline.content[found.end() :]


def _emphasis(state: StateInline, silent: bool) -> bool:
    # Like markdown-it's rule, but `_scan_delimiters` decides whether a mark can open or close emphasis.
    marker = state.src[state.pos]
    if silent or marker not in ("_", "*"):
        return False
    scanned = _scan_delimiters(state, marker == "*")
    for _ in range(scanned.length):
        state.push("text", "", 0).content = marker
        delimiter = Delimiter(
            marker=ord(marker),
            length=scanned.length,
            token=len(state.tokens) - 1,
            end=-1,
            open=scanned.can_open,
            close=scanned.can_close,
        )
        state.delimiters.append(delimiter)
    state.pos += scanned.length
    return True


def _scan_delimiters(state: StateInline, can_split_word: bool) -> Scanned:
    # In CommonMark, emphasis does not end at a mark that follows punctuation and precedes a letter, because words are
    # expected to be separated by spaces. Chinese, Japanese and Korean text has no such spaces. Therefore, on the
    # outer side of a mark, characters of these scripts count as spaces. On the inner side, their punctuation counts as
    # letters.
    scanned = state.scanDelims(state.pos, can_split_word)
    before = state.src[state.pos - 1] if state.pos > 0 else " "
    end = state.pos + scanned.length
    after = state.src[end] if end < state.posMax else " "
    if not (_CJK.match(before) or _CJK.match(after)) or not can_split_word:
        return scanned
    opens = not _is_blank(after) and (not _is_non_cjk_punctuation(after) or _is_edge(before))
    closes = not _is_blank(before) and (not _is_non_cjk_punctuation(before) or _is_edge(after))
    return Scanned(opens, closes, scanned.length)


def _is_blank(character: str) -> bool:
    return isWhiteSpace(ord(character))


def _is_non_cjk_punctuation(character: str) -> bool:
    is_mark = isMdAsciiPunct(ord(character)) or isPunctChar(character)
    return is_mark and _CJK.match(character) is None


def _is_edge(character: str) -> bool:
    return _is_blank(character) or _is_non_cjk_punctuation(character) or _CJK.match(character) is not None


_LABELS = {
    "copy-code": "code_copy",
    "wrap-code": "code_wrap",
    "preview-code": "code_preview",
    "whole-code": "code_whole",
}


def translate_labels(html: str) -> str:
    """Translate the English labels in stored HTML to the language of the page."""
    if language.get() == "en":
        return html
    for name, word in _LABELS.items():
        # Text from the model cannot contain this tag, because `<` is escaped in text.
        button = f'<button class="{name}" type="button">'
        html = html.replace(f"{button}{language_table('en')[word]}</button>", f"{button}{words[word]}</button>")
    for kind in ALERTS:
        title = '<p class="alert-title">{}</p>'
        html = html.replace(title.format(language_table("en")["alert_" + kind]), title.format(words["alert_" + kind]))
    return html
