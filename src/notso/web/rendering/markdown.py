"""Convert Markdown to safe HTML, block by block.

Reference links are disabled because a definition on a later line could change a block that has already been sent.
Images become links because loading an image can leak the conversation. Text that exceeds the budget is not formatted.

HTML from model output is sanitized after rendering. Later steps (labels, citations) may insert only their own markup,
with escaped text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from html.parser import HTMLParser

import nh3
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, image, link
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from notso.web.rendering.budget import Budget, Deadline, OverBudgetError
from notso.web.rendering.code import TOKEN_CLASSES, code_block
from notso.web.rendering.extensions import ALERTS, alert_title, enable_extensions
from notso.web.rendering.math import MAX_FORMULA_CHARACTERS, enable_math, formula_html
from notso.web.values.wording import words

_TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "figure", "h3", "h4", "h5", "h6"),
    *("hr", "li", "ol", "p", "pre", "s", "span", "strong", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"),
    *("details", "ins", "kbd", "mark", "sub", "summary"),
}
_CLEANER = nh3.Cleaner(
    tags=_TAGS,
    clean_content_tags={"script", "style"},
    attributes={"*": set(), "a": {"href"}, "ol": {"start"}},
    url_schemes={"http", "https", "mailto"},
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={
        "a": {"target": "_blank"},
        "button": {"type": "button"},  # in code blocks only; Markdown cannot produce buttons
        "pre": {"tabindex": "0"},  # scrollable elements must be reachable by keyboard
        "figure": {"tabindex": "0"},
        "table": {"dir": "auto"},  # the direction of columns follows the table's text
    },
    allowed_classes={
        "span": {*TOKEN_CLASSES, "math", "inline", "display", "quote"},
        "div": {"code-block", "code-label", "long", "math", "display"},
        "blockquote": {"alert", *(f"alert-{kind}" for kind in ALERTS)},
        "button": {"copy-code", "wrap-code", "preview-code", "whole-code"},
        "figure": {"wide-table"},
        "p": {"plain", "alert-title"},
        "li": {"task"},
        "td": {"align-left", "align-right", "align-center"},
        "th": {"align-left", "align-right", "align-center"},
    },
)

# htmx 4 rewrites `<hx-name ` in raw text before parsing, and processes hx- attributes on all elements. Sanitized HTML
# must contain neither. Otherwise, model output could send requests in the user's name.
_HTMX_TAG = re.compile(r"</?hx-", re.IGNORECASE)


class UnsafeHTMLError(ValueError):
    """Sanitized HTML still contains htmx markup, which is a bug. The text is shown as plain text."""


def sanitize(html: str) -> str:
    """Reduce HTML to the allowed elements and attributes. Raises UnsafeHTMLError."""
    clean = _CLEANER.clean(html)
    if _HTMX_TAG.search(clean):
        raise UnsafeHTMLError("an htmx tag survived")
    if "hx-" in clean.lower():
        _AttributeCheck().feed(clean)
    return clean


class _AttributeCheck(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, _ in attrs:
            if name.startswith(("hx-", "data-hx-")):
                raise UnsafeHTMLError("an htmx attribute survived")


RENDERER_VERSION = 10  # increase when the renderer's output changes, so that stored messages are rendered again

MAX_MARKDOWN_CHARACTERS = 256 * 1024
MAX_PARAGRAPH_CHARACTERS = 16 * 1024
MAX_NESTING = 32  # a quotation counts as one level, and a list item, with its list, as two

_LINE_END = re.compile(r"\r\n?")
# Matches a line as CommonMark defines it, once CRs have been replaced. str.splitlines would also split at U+2028, form
# feeds and other characters.
LINE = re.compile(r"[^\n]*\n|[^\n]+")


class _LongParagraphError(Exception):
    pass


def _heading_tag(tag: str) -> str:
    # Headings start at h3, because screen readers expect them below the h1 of the page and the h2 of the message.
    return f"h{min(6, int(tag[1:]) + 2)}"


class _Renderer(RendererHTML):
    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        deadline, color = env["deadline"], bool(env["color"])
        code, info = tokens[idx].content, tokens[idx].info
        if info.split()[:1] in (["math"], ["latex-math"]) and code.strip() and len(code) <= MAX_FORMULA_CHARACTERS:
            return formula_html(code, "block") + "\n"
        return code_block(code, info, deadline=deadline, color=color)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return code_block(tokens[idx].content, "", deadline=env["deadline"], color=False)

    def heading_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<{_heading_tag(tokens[idx].tag)}>"

    def heading_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"</{_heading_tag(tokens[idx].tag)}>\n"

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        source = str(tokens[idx].attrs.get("src", ""))
        label = tokens[idx].content or source
        return f'<a href="{escapeHtml(source)}">{escapeHtml(label)}</a>'

    def formula(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, "block") + "\n"

    def formula_inline(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return formula_html(tokens[idx].content, tokens[idx].info)

    def note(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<sup>{escape(tokens[idx].content)}</sup>"

    def quotation(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f'<span class="quote">{escape(tokens[idx].content)}</span>'

    def plain(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return render_plain(tokens[idx].content)

    def blockquote_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        kind = tokens[idx].meta.get("alert")
        return f'<blockquote class="alert alert-{kind}">\n{alert_title(kind)}' if kind else "<blockquote>\n"

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return '<figure class="wide-table"><table>\n'  # the figure scrolls, so that a wide table keeps its layout

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return "</table></figure>\n"

    def td_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        side = str(token.attrs.get("style", "")).removeprefix("text-align:")
        return f'<{token.tag} class="align-{side}">' if side in ("left", "right", "center") else f"<{token.tag}>"

    th_open = td_open


def _check_budget(state: StateBlock | StateInline, *_: object) -> bool:
    # This rule precedes all others, so it is called before every parsing step. It never matches.
    state.env["deadline"].check()
    return False


def _check_delimiters(state: StateInline) -> None:
    state.env["deadline"].check()


def _limit_nesting(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if silent or state.level < MAX_NESTING:
        return False
    # Deeper content becomes plain text, up to the end of the list item or quotation that contains it.
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


def _if_target_follows(rule: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    # Without this check, markdown-it would scan to the end of the text at each bracket that does not start a link.
    return lambda state, silent: state.src.find("](", state.pos) >= 0 and rule(state, silent)


def _parser() -> MarkdownIt:
    # At its own nesting limit, markdown-it drops all further content. That limit is two levels above MAX_NESTING, so
    # that `_limit_nesting` applies first, even in a list, which adds two levels at once.
    parser = MarkdownIt(
        "commonmark", {"html": False, "breaks": True, "maxNesting": MAX_NESTING + 2}, renderer_cls=_Renderer
    )
    enable_math(parser)
    enable_extensions(parser)
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block", "html_inline"])
    interrupted = ["paragraph", "blockquote", "list", "table"]
    parser.block.ruler.before("table", "too_deep", _limit_nesting)
    parser.block.ruler.before("too_deep", "budget", _check_budget, {"alt": interrupted})
    parser.inline.ruler.before("text", "budget", _check_budget)
    parser.inline.ruler2.before("balance_pairs", "budget", _check_delimiters)
    parser.inline.ruler.at("link", _if_target_follows(link))
    parser.inline.ruler.at("image", _if_target_follows(image))
    parser.core.ruler.before("inline", "long_paragraphs", _refuse_long_paragraphs)
    return parser


_MARKDOWN = _parser()
_BLOCKS_ONLY = _parser().disable(["inline", "long_paragraphs"])


def render_markdown(text: str, *, budget: Budget | None = None) -> str:
    """Render text as safe HTML. By default, the budget is that of one message.

    Parts that exceed a limit become plain paragraphs. Blocks.
    """
    budget = budget or Budget()
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return render_plain(text)
    text = _LINE_END.sub("\n", text)
    lines, html, done = LINE.findall(text), "", 0
    try:
        with budget.spending() as deadline:
            blocks = top_level_blocks(text, deadline)
        for block in blocks:
            done = block.start
            html += render_block("".join(lines[block]), budget)
    except OverBudgetError:
        return html + render_unformatted("".join(lines[done:]), budget)
    return html


def render_block(text: str, budget: Budget) -> str:
    """Render a block. Raises OverBudgetError."""
    with budget.spending() as deadline:
        return budget.charge_html(render_within(text, deadline))


def render_within(text: str, deadline: Deadline, *, color: bool = True) -> str:
    """Render text, as plain text if a paragraph is too long or rendering fails. Raises OverBudgetError."""
    try:
        return sanitize(_MARKDOWN.render(text, {"color": color, "deadline": deadline}))
    except (RecursionError, UnsafeHTMLError, _LongParagraphError):
        return render_plain(text)


def render_plain(text: str) -> str:
    """Return text as an escaped paragraph. The style sheet preserves its line breaks."""
    return f'<p class="plain">{escape(text)}</p>\n'


def render_unformatted(text: str, budget: Budget) -> str:
    note = "" if budget.is_noted else words["unformatted"]
    budget.is_noted = True
    return (f"<p><em>{escape(note)}</em></p>\n" if note else "") + render_plain(text)


def top_level_blocks(text: str, deadline: Deadline) -> list[slice]:
    """Return each top-level block's range of lines. Raises OverBudgetError."""
    tokens = _BLOCKS_ONLY.parse(text, {"deadline": deadline})
    return [slice(*token.map) for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
