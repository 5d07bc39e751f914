"""Child process that highlights code: a line of JSON in, a line of JSON out, until its input ends.

Lexers are regular expressions, some of them quadratic or worse, and a single match can neither be interrupted nor
releases the GIL. So they run in this process, which a CPU timer kills when a block takes too long.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from functools import lru_cache

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

_lexer = lru_cache(maxsize=64)(get_lexer_by_name)


def main() -> None:
    """Read lines of {"code", "language", "seconds"}, write lines of {"html", "seconds"}."""
    formatter = HtmlFormatter(nowrap=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # SIGVTALRM is left at its default action, which ends the process.
        signal.setitimer(signal.ITIMER_VIRTUAL, asked["seconds"])
        began = time.process_time()
        html = highlight(asked["code"], _lexer(asked["language"], stripnl=False), formatter)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer = {"html": html, "seconds": time.process_time() - began}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
