"""Today's date and the time of day, here or in a named zone."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from notso.web.tools.chat_tool import ChatTool, Surroundings
from notso.web.values.errors import ToolError

MAX_NAME_CHARACTERS = 64


def spelt(zone: str, now: datetime) -> str:
    """`now` (with its zone) as a sentence, in `zone` or, where that is '', where this machine stands.

    Raises ToolError for a zone nobody knows.
    """
    name = zone_named(zone) if zone.strip() else ""
    local = now.astimezone(ZoneInfo(name)) if name else now.astimezone()
    offset = local.strftime("%z")
    where = name or local.tzname() or "local time"
    return f"{local:%A}, {local.day} {local:%B %Y}, {local:%H:%M:%S} ({where}, UTC{offset[:3]}:{offset[3:5]})"


def zone_named(text: str) -> str:
    """The zone of the time zone database that is meant: by its name, or by that of its city."""
    wanted = text.strip().replace(" ", "_").lower()
    if len(wanted) <= MAX_NAME_CHARACTERS:
        if wanted in _zones():
            return _zones()[wanted]
        close = difflib.get_close_matches(wanted, _zones(), n=3, cutoff=0.7)
        if close:
            raise ToolError(f"there is no zone {text!r}; near it: {', '.join(_zones()[name] for name in close)}")
    raise ToolError("unknown time zone; use a name such as Europe/Paris, or a city")


@cache
def _zones() -> dict[str, str]:
    """Each zone by its name in small letters, and by that of its city where one zone alone has it."""
    names = sorted(name for name in available_timezones() if not name.startswith(("posix", "right", "System")))
    cities: dict[str, list[str]] = {}
    for name in names:
        if "/" in name and not name.startswith("Etc/"):
            cities.setdefault(name.rpartition("/")[2].lower(), []).append(name)
    alone = {city: found[0] for city, found in cities.items() if len(found) == 1}
    return alone | {name.lower(): name for name in names}


async def _run(arguments: Mapping[str, Any], surroundings: Surroundings) -> str:
    return await asyncio.to_thread(spelt, arguments.get("zone", ""), datetime.now(UTC))


CLOCK = ChatTool(
    name="clock",
    description="Get today's date and the time of day, here or in a time zone.",
    parameters={
        "type": "object",
        "properties": {"zone": {"type": "string", "description": "For example Europe/Paris; left out: here"}},
    },
    run=_run,
)
