"""A program that colours code for another: a line of JSON in, a line of JSON out, until its input ends.

The lexers are regular expressions, and some take time in the square of a text's length or worse; one match cannot be
interrupted, and holds the interpreter of the process it runs in. So they have a process of their own, which dies where
a block takes too long: it sets itself a timer of its own processor time and leaves the signal to its default.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from functools import lru_cache

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]


def main() -> None:
    """Lines of {"code", "language", "seconds"} in, of {"html", "seconds"} out."""
    formatter = HtmlFormatter(nowrap=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, asked["seconds"])
        began = time.process_time()
        html = highlight(asked["code"], _lexer(asked["language"]), formatter)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer = {"html": html, "seconds": time.process_time() - began}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer:
    return get_lexer_by_name(language, stripnl=False)
