"""Lines that clients put before the system prompt, anew with every request, and that tell the model nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

VOLATILE_LINES: Mapping[str, re.Pattern[str]] = {
    # Claude Code: its version, how it was started, and a sum over the request, which is another each time.
    "x-anthropic-billing-header": re.compile(
        r"x-anthropic-billing-header:(?:[ \t]*+[a-z_]++=[\w.\-]*+;?+)++[ \t]*+(?:\n|\Z)"
    ),
}
"""Name -> the line. Each is known, is the first of the system prompt, and is left out only where it is whole of this
form: a line that says anything else is read by the model, as is every other text that changes. Clients choose the text,
so every repetition is possessive: nothing is matched a second way."""


def without_volatile_lines(system: str) -> tuple[str, tuple[str, ...]]:
    """The system prompt without such lines at its beginning, and their names: what is behind them is then found in the
    cache."""
    for name, line in VOLATILE_LINES.items():
        if found := line.match(system):
            return system[found.end() :], (name,)
    return system, ()
