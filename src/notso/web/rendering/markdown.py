"""Markdown to safe HTML, one block after another.

Reference links are off: with them a line far below could change a block above, and a block already sent is never
touched again. Images become links, because fetching an address can carry a conversation out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from notso.web.rendering.code import code_block
from notso.web.rendering.math import enable_math, formula_html
from notso.web.rendering.sanitiser import UnsafeHTMLError, sanitise

RENDERER_VERSION = 2
"""Raised whenever the same text would give other HTML, so that stored HTML is made anew."""

MAX_MARKDOWN_CHARACTERS = 256 * 1024
MAX_PARAGRAPH_CHARACTERS = 16 * 1024
MAX_NESTING = 32

_LINE_END = re.compile(r"\r\n?")
# The lines CommonMark counts: it does not end a line at U+2028, form feed and their like, as str.splitlines does.
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, slots=True)
class Block:
    """Lines [start, end) of a text hold one top-level block."""

    start: int
    end: int


class _Renderer(RendererHTML):
    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return code_block(tokens[idx].content, tokens[idx].info, colour=bool(env.get("colour", True)))

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return code_block(tokens[idx].content, "", colour=False)

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        source = str(tokens[idx].attrs.get("src", ""))
        label = tokens[idx].content or source
        return f'<a href="{escapeHtml(source)}">{escapeHtml(label)}</a>'

    def formula(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, "block") + "\n"

    def formula_inline(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, tokens[idx].info)

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


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_NESTING}, renderer_cls=_Renderer)
    enable_math(parser)
    return parser.enable(["table", "strikethrough"]).disable(["reference", "html_block", "html_inline"])


_MARKDOWN = _parser()
_BLOCKS_ONLY = _parser().disable(["inline"])


def render_markdown(text: str, *, colour: bool = True) -> str:
    """Safe HTML of a text; what is past our limits comes back as plain paragraphs. Takes time: not on the loop."""
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return render_plain(text)
    text = _LINE_END.sub("\n", text)
    whole = _render(text, colour)
    if whole is not None:
        return whole
    lines = split_lines(text)
    pieces = ("".join(lines[block.start : block.end]) for block in top_level_blocks(text))
    return "".join(_render(piece, colour) or render_plain(piece) for piece in pieces)


def _render(text: str, colour: bool) -> str | None:
    """HTML, or None where a paragraph is too long to be read for markup or the sanitiser found a fault."""
    env: dict[str, Any] = {"colour": colour}
    try:
        tokens = _BLOCKS_ONLY.parse(text)
        if any(token.type == "inline" and len(token.content) > MAX_PARAGRAPH_CHARACTERS for token in tokens):
            return None
        return sanitise(_MARKDOWN.render(text, env))
    except (RecursionError, UnsafeHTMLError):
        return None


def render_plain(text: str) -> str:
    """Text as it is, escaped, its line breaks kept by the style sheet."""
    return f'<p class="plain">{escape(text)}</p>\n'


def split_lines(text: str) -> list[str]:
    """The lines of a text whose line ends are all LF, each with its end."""
    return _LINE.findall(text)


def top_level_blocks(text: str) -> list[Block]:
    """Where the top-level blocks of `text` stand, in lines."""
    tokens = _BLOCKS_ONLY.parse(text)
    return [
        Block(token.map[0], token.map[1]) for token in tokens if token.level == 0 and token.map and token.nesting >= 0
    ]
