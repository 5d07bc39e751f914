"""The lines that begin with a slash: one table for the page's palette, its help, and `notso chat`.

The front door binds functions to the names it knows; the page binds what its elements can do.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["page", "terminal"]

BOTH: tuple[Place, ...] = ("page", "terminal")
PAGE: tuple[Place, ...] = ("page",)
TERMINAL: tuple[Place, ...] = ("terminal",)


class SlashCommand(NamedTuple):
    """A command as a person reads it. `act` is what the page does: a verb and what it is done to.

    `open` shows the element of that id, `click` presses the last element that matches, `post` sends to the chat's
    address (with the argument as the field `field`, if there is one), `go` follows the chat's address, argument last;
    a target that begins with a slash is an address of its own. `choose` and `thinking` set a control of the page.
    `argument` is the pattern of what the page takes after the name.
    """

    name: str
    usage: str
    does: str
    places: tuple[Place, ...] = BOTH
    act: str = ""
    target: str = ""
    field: str = ""
    argument: str = ""


SLASH_COMMANDS: tuple[SlashCommand, ...] = (
    SlashCommand("help", "", "commands and keys", act="open", target="help"),
    SlashCommand("clear", "", "empties this chat and keeps its settings", act="post", target="clear"),
    SlashCommand("reset", "", "empties this chat, settings back to their defaults", PAGE, "post", "reset"),
    SlashCommand(
        "thinking",
        "[on|off|N]",
        "thinks before it answers, within N tokens",
        act="thinking",
        argument=r"on|off|\d{1,5}",
    ),
    SlashCommand(
        "temp",
        "[0..2]",
        "sets the temperature; 0 is greedy",
        act="post",
        target="settings",
        field="temperature",
        argument=r"[01]?[.,]\d+|[012]|2[.,]0+",
    ),
    SlashCommand("regenerate", "", "answers the last question anew", act="click", target="[data-regenerate]"),
    SlashCommand("continue", "", "goes on with the last answer", PAGE, "click", "[data-continue]"),
    SlashCommand("summarize", "", "puts a summary in place of older turns", PAGE, "post", "summarize"),
    SlashCommand("export", "[md|json|html]", "downloads this chat", PAGE, "go", "export/", argument="md|json|html"),
    SlashCommand("status", "", "shows model and how full the context is", act="open", target="status-details"),
    SlashCommand(
        "model", "[NAME]", "shows the models, or takes another one", PAGE, "post", "/models/switch", "model", r".{1,80}"
    ),
    SlashCommand(
        "theme", "[light|dark|system]", "changes the look", PAGE, "choose", "theme", argument="light|dark|system"
    ),
    SlashCommand("settings", "", "opens the settings", PAGE, "open", "settings"),
    SlashCommand("system", "[TEXT|-]", "shows, sets or (-) drops the instructions", TERMINAL),
    SlashCommand("exit", "", "leaves", TERMINAL),
)


def commands_of(place: Place) -> tuple[SlashCommand, ...]:
    """The commands that exist there, in the order they are listed."""
    return tuple(command for command in SLASH_COMMANDS if place in command.places)
