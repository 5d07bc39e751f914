"""The lines that begin with a slash: one table for the page's palette, its help, and `notso chat`.

The front door binds functions to the names it knows; the page binds what its elements can do.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from notso.web.values.wording import words

Place = Literal["page", "terminal"]

BOTH: tuple[Place, ...] = ("page", "terminal")
PAGE: tuple[Place, ...] = ("page",)
TERMINAL: tuple[Place, ...] = ("terminal",)


class SlashCommand(NamedTuple):
    """A command as a person reads it. `act` is what the page does: a verb and what it is done to.

    `open` shows the element of that id, `click` presses the last element that matches, `post` sends to the chat's
    address (with the argument as the field `field`, if there is one), `go` follows the chat's address, argument last;
    a target that begins with a slash is an address of its own. `choose` and `thinking` set a control of the page.
    `argument` is the pattern of what the page takes after the name. `said` is what a plugin says of its own one.
    """

    name: str
    usage: str
    places: tuple[Place, ...] = BOTH
    act: str = ""
    target: str = ""
    field: str = ""
    argument: str = ""
    said: str = ""

    @property
    def does(self) -> str:
        """What it is for, in a few words: a plugin's own, or ours in the reader's language."""
        return self.said or words[f"command_{self.name}"]


SLASH_COMMANDS: tuple[SlashCommand, ...] = (
    SlashCommand("help", "", act="open", target="help"),
    SlashCommand("clear", "", act="post", target="clear"),
    SlashCommand("reset", "", PAGE, "post", "reset"),
    SlashCommand(
        "thinking",
        "[on|off|N]",
        act="thinking",
        argument=r"on|off|\d{1,5}",
    ),
    SlashCommand(
        "temp",
        "[0..2]",
        act="post",
        target="settings",
        field="temperature",
        argument=r"[01]?[.,]\d+|[012]|2[.,]0+",
    ),
    SlashCommand("regenerate", "", act="click", target="[data-regenerate]"),
    SlashCommand("continue", "", PAGE, "click", "[data-continue]"),
    SlashCommand("summarize", "", PAGE, "post", "summarize"),
    SlashCommand("export", "[md|json|html]", PAGE, "go", "export/", argument="md|json|html"),
    SlashCommand("status", "", act="open", target="status-details"),
    SlashCommand("model", "[NAME]", PAGE, "post", "/models/switch", "model", r".{1,80}"),
    SlashCommand("theme", "[light|dark|system]", PAGE, "choose", "theme", argument="light|dark|system"),
    SlashCommand("settings", "", PAGE, "open", "settings"),
    SlashCommand("system", "[TEXT|-]", TERMINAL),
    SlashCommand("exit", "", TERMINAL),
)


def commands_of(place: Place) -> tuple[SlashCommand, ...]:
    """The commands that exist there, in the order they are listed."""
    return tuple(command for command in SLASH_COMMANDS if place in command.places)
