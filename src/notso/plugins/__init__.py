"""Plugin API, and the processes in which the server runs plugins; see docs/plugins.md.

Plugins import this package, so it must load no third-party library.
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
