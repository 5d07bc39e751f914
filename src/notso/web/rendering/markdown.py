"""Markdown to safe HTML, one block after another.

Reference links are off: with them a line far below could change a block above, and a block already sent is never
touched again. Images become links, because fetching an address can carry a conversation out. What costs
more than its budget is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, image, link
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from notso.web.rendering.budget import Budget, Deadline, OverBudgetError
from notso.web.rendering.code import code_block
from notso.web.rendering.inline_marks import enable_inline_marks, note_html
from notso.web.rendering.math import enable_math, formula_html
from notso.web.rendering.sanitiser import UnsafeHTMLError, sanitise
from notso.web.values.wording import words

RENDERER_VERSION = 6
"""Raised whenever the same text would give other HTML, so that stored HTML is made anew."""

MAX_MARKDOWN_CHARACTERS = 256 * 1024
MAX_PARAGRAPH_CHARACTERS = 16 * 1024
MAX_NESTING = 32  # levels: a quotation is one, a list with its item two

_LINE_END = re.compile(r"\r\n?")
# The lines CommonMark counts: it does not end a line at U+2028, form feed and their like, as str.splitlines does.
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, slots=True)
class Block:
    """Lines [start, end) of a text hold one top-level block."""

    start: int
    end: int


class _LongParagraphError(Exception):
    """A paragraph is too long to be read for markup."""


class _Renderer(RendererHTML):
    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        deadline, colour = env["deadline"], bool(env["colour"])
        return code_block(tokens[idx].content, tokens[idx].info, deadline=deadline, colour=colour)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return code_block(tokens[idx].content, "", deadline=env["deadline"], colour=False)

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        source = str(tokens[idx].attrs.get("src", ""))
        label = tokens[idx].content or source
        return f'<a href="{escapeHtml(source)}">{escapeHtml(label)}</a>'

    def formula(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, "block") + "\n"

    def formula_inline(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, tokens[idx].info)

    def note(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return note_html(tokens[idx].content)

    def plain(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return render_plain(tokens[idx].content)

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return '<figure class="wide-table"><table>\n'  # what is too wide scrolls in its own box, and stays a table

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return "</table></figure>\n"

    def _cell(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        side = str(token.attrs.get("style", "")).removeprefix("text-align:")
        return f'<{token.tag} class="align-{side}">' if side in ("left", "right", "center") else f"<{token.tag}>"

    def th_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return self._cell(tokens, idx, options, env)

    def td_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return self._cell(tokens, idx, options, env)


def _keep_to_budget(state: StateBlock | StateInline, *_: object) -> bool:
    """A rule that stands before all others and takes nothing: it is asked at each position."""
    state.env["deadline"].check()
    return False


def _check_pairs(state: StateInline) -> None:
    state.env["deadline"].check()


def _too_deep(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """What stands deeper than we follow is plain text, to the end of the item or quotation that holds it."""
    if silent or state.level < MAX_NESTING:
        return False
    line = start + 1
    while line < end and (state.isEmpty(line) or state.sCount[line] >= state.blkIndent):
        line += 1
    token = state.push("plain", "", 0)
    token.content = state.getLines(start, line, state.blkIndent, False).rstrip("\n")
    token.map = [start, line]
    state.line = line
    return True


def _refuse_long_paragraphs(state: StateCore) -> None:
    if any(token.type == "inline" and len(token.content) > MAX_PARAGRAPH_CHARACTERS for token in state.tokens):
        raise _LongParagraphError


def _link(state: StateInline, silent: bool) -> bool:
    return state.src.find("](", state.pos) >= 0 and link(state, silent)  # each lone bracket would be read to the end


def _image(state: StateInline, silent: bool) -> bool:
    return state.src.find("](", state.pos) >= 0 and image(state, silent)


def _parser() -> MarkdownIt:
    # A list adds two levels: markdown-it would drop what is at its own limit, and all that follows it.
    parser = MarkdownIt(
        "commonmark", {"html": False, "breaks": True, "maxNesting": MAX_NESTING + 2}, renderer_cls=_Renderer
    )
    enable_math(parser)
    enable_inline_marks(parser)
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block", "html_inline"])
    interrupted = ["paragraph", "blockquote", "list", "table"]
    parser.block.ruler.before("table", "too_deep", _too_deep)
    parser.block.ruler.before("too_deep", "budget", _keep_to_budget, {"alt": interrupted})
    parser.inline.ruler.before("text", "budget", _keep_to_budget)
    parser.inline.ruler2.before("balance_pairs", "budget", _check_pairs)
    parser.inline.ruler.at("link", _link)
    parser.inline.ruler.at("image", _image)
    parser.core.ruler.before("inline", "long_paragraphs", _refuse_long_paragraphs)
    return parser


_MARKDOWN = _parser()
_BLOCKS_ONLY = _parser().disable(["inline", "long_paragraphs"])


def render_markdown(text: str, *, budget: Budget | None = None) -> str:
    """Safe HTML of a text; what is past our limits comes back as plain paragraphs. Takes time: not on the loop.

    `budget` is what is left for the message that the text is of, or all of one.
    """
    budget = budget or Budget()
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return render_plain(text)
    text = _LINE_END.sub("\n", text)
    lines, html, done = split_lines(text), "", 0
    try:
        with budget.spending() as deadline:
            blocks = top_level_blocks(text, deadline)
        for block in blocks:
            done = block.start
            html += render_block("".join(lines[block.start : block.end]), budget)
    except OverBudgetError:
        return html + render_unformatted("".join(lines[done:]), budget)
    return html


def render_block(text: str, budget: Budget) -> str:
    """Safe HTML of one block. Raises OverBudgetError."""
    with budget.spending() as deadline:
        return budget.take(render_within(text, deadline))


def render_within(text: str, deadline: Deadline, *, colour: bool = True) -> str:
    """Safe HTML of a text; plain where it holds too long a paragraph, or the sanitiser found a fault.

    Raises OverBudgetError.
    """
    try:
        return sanitise(_MARKDOWN.render(text, {"colour": colour, "deadline": deadline}))
    except (RecursionError, UnsafeHTMLError, _LongParagraphError):
        return render_plain(text)


def render_plain(text: str) -> str:
    """Text as it is, escaped, its line breaks kept by the style sheet."""
    return f'<p class="plain">{escape(text)}</p>\n'


def render_unformatted(text: str, budget: Budget) -> str:
    """Text whose layout would cost too much, plain; the first time for a message, with a line that says so."""
    note = "" if budget.is_noted else words["unformatted"]
    budget.is_noted = True
    return (f"<p><em>{escape(note)}</em></p>\n" if note else "") + render_plain(text)


def split_lines(text: str) -> list[str]:
    """The lines of a text whose line ends are all LF, each with its end."""
    return _LINE.findall(text)


def top_level_blocks(text: str, deadline: Deadline) -> list[Block]:
    """Where the top-level blocks of `text` stand, in lines. Raises OverBudgetError."""
    tokens = _BLOCKS_ONLY.parse(text, {"deadline": deadline})
    return [
        Block(token.map[0], token.map[1]) for token in tokens if token.level == 0 and token.map and token.nesting >= 0
    ]
