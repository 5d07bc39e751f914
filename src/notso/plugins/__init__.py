"""What a plugin is made of, for whoever writes one, and how the server runs them: each in a process of its own.

The names below come at once and need no library. `docs/plugins.md` tells the rest.
"""

from notso.plugins.values import (
    CalledIn,
    LogitsProcessor,
    Page,
    PageRequest,
    PageResponse,
    Plugin,
    Refused,
    SignInRequest,
    SlashCommand,
    Tool,
)

__all__ = [
    "CalledIn",
    "LogitsProcessor",
    "Page",
    "PageRequest",
    "PageResponse",
    "Plugin",
    "Refused",
    "SignInRequest",
    "SlashCommand",
    "Tool",
]
