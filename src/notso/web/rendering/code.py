"""Render code blocks. Pygments highlights a fixed set of languages, with CSS classes instead of inline styles.

Pygments' lexers use regular expressions, some of which take quadratic time or worse. A single match cannot be
interrupted and holds the GIL. Therefore, lexers run in a child process. A CPU timer kills the process if a block takes
too long, and the next block starts a new process.
"""

from __future__ import annotations

import atexit
import json
import re
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from html import escape

from pygments.token import STANDARD_TYPES  # type: ignore[import-untyped]

from notso.web.rendering.budget import Deadline
from notso.web.values.wording import language_table

BLOCK_SECONDS = 0.2  # 20,000 characters of typical code take 0.02 to 0.06 s

_PROGRAM = "from notso.web.rendering.code import highlight_lines; highlight_lines()"


class Highlighter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def html(self, code: str, language: str) -> tuple[str | None, float]:
        """Return `code` as HTML with spans for highlighting, and the CPU time in seconds.

        The HTML is None if the block exceeds BLOCK_SECONDS or the child process fails.
        """
        request = {"code": code, "language": language, "seconds": BLOCK_SECONDS}
        with self._lock:
            try:
                line = self._answer(json.dumps(request).encode() + b"\n")
            except OSError:
                line = b""
            if not line:
                self._end()
                return None, BLOCK_SECONDS
        answer = json.loads(line)
        return str(answer["html"]), float(answer["seconds"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not reach the child
            )
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise OSError("a process without pipes")
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


MAX_HIGHLIGHTED_CHARACTERS = 20_000
MAX_UNFOLDED_LINES = 40

# Info string of a fenced code block -> Pygments language
LANGUAGES: dict[str, str] = {
    **{name: name for name in ("bash", "c", "cpp", "css", "diff", "go", "html", "ini", "java", "javascript", "json")},
    **{name: name for name in ("kotlin", "lua", "makefile", "php", "python", "ruby", "rust", "sql", "swift", "toml")},
    **{name: name for name in ("typescript", "xml", "yaml")},
    **{"c++": "cpp", "htm": "html", "js": "javascript", "py": "python", "python3": "python", "rb": "ruby"},
    **{"rs": "rust", "sh": "bash", "shell": "bash", "ts": "typescript", "yml": "yaml"},
}

_NAME = re.compile(r"[A-Za-z0-9_.+#-]{1,24}")

HIGHLIGHTER = Highlighter()
_WORDS = language_table("en")  # stored HTML has English labels; `translate_labels` translates them for each page

# All classes that the highlighter can produce. The sanitizer allows them on spans.
TOKEN_CLASSES: frozenset[str] = frozenset(name for name in STANDARD_TYPES.values() if name)


def pygments_language(info: str) -> str:
    words = info.split(maxsplit=1)
    return LANGUAGES.get(words[0].lower(), "") if words else ""


def code_block(code: str, info: str, *, deadline: Deadline, color: bool) -> str:
    """Render a code block with its label and buttons; long blocks are collapsed. Raises OverBudgetError."""
    language = pygments_language(info)
    body = None
    if color and language and len(code) <= MAX_HIGHLIGHTED_CHARACTERS:
        deadline.check()
        body, seconds = HIGHLIGHTER.html(code, language)
        deadline.charge(seconds)
        deadline.check()
    if body is None:
        body = escape(code)
    long = code.count("\n") > MAX_UNFOLDED_LINES
    tools = _button("copy-code", _WORDS["code_copy"]) + _button("wrap-code", _WORDS["code_wrap"])
    if info.split()[:1] in (["html"], ["svg"], ["mermaid"]):
        tools += _button("preview-code", _WORDS["code_preview"])
    if long:
        tools += _button("whole-code", _WORDS["code_whole"])
    label = f'<div class="code-label"><span>{escape(_label(info, language))}</span>{tools}</div>'
    return f'<div class="code-block{" long" if long else ""}">{label}<pre><code>{body}</code></pre></div>\n'


def _label(info: str, language: str) -> str:
    name = info.split(maxsplit=1)[:1]
    return language or (name[0] if name and _NAME.fullmatch(name[0]) else _WORDS["code"])


def _button(name: str, label: str) -> str:
    return f'<button class="{name}">{escape(label)}</button>'


def highlight_lines() -> None:
    """Run the child process: read lines of {"code", "language", "seconds"}, write lines of {"html", "seconds"}."""
    from pygments import highlight  # type: ignore[import-untyped]
    from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

    formatter, lexer = HtmlFormatter(nowrap=True), lru_cache(maxsize=64)(get_lexer_by_name)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # After this time, SIGVTALRM ends the process: there is no handler, so the default action applies.
        signal.setitimer(signal.ITIMER_VIRTUAL, request["seconds"])
        began = time.process_time()
        html = highlight(request["code"], lexer(request["language"], stripnl=False), formatter)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer = {"html": html, "seconds": time.process_time() - began}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
