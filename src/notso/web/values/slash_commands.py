"""Define the keyboard shortcuts of the page, and the slash commands of the page and of `notso chat`.

`notso chat` runs a function for each command; the page performs the action `act`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from notso.web.values.wording import words

Place = Literal["page", "terminal"]

BOTH: tuple[Place, ...] = ("page", "terminal")
PAGE: tuple[Place, ...] = ("page",)
TERMINAL: tuple[Place, ...] = ("terminal",)


class SlashCommand(NamedTuple):
    name: str
    usage: str
    places: tuple[Place, ...] = BOTH
    # Action on the page: `open` shows the element with id `target`. `click` clicks the last match of the selector
    # `target`. `post` sends a form to the URL `target`, with the argument in the field `field`. `go` navigates to the
    # URL `target`, with the argument appended. URLs are relative to the chat's URL unless they begin with a slash.
    # `choose` and `thinking` set a control. `offer` inserts or attaches a text from an MCP server.
    act: str = ""
    target: str = ""
    field: str = ""
    argument: str = ""  # regular expression for the argument on the page
    said: str = ""  # the description of a plugin's or an MCP server's command

    @property
    def does(self) -> str:
        """Description in the user's language, or the one supplied with the command."""
        return self.said or words[f"command_{self.name}"]


SLASH_COMMANDS: tuple[SlashCommand, ...] = (
    SlashCommand("help", "", act="open", target="help"),
    SlashCommand("clear", "", act="post", target="clear"),
    SlashCommand("reset", "", PAGE, "post", "reset"),
    SlashCommand("thinking", "[on|off|N]", act="thinking", argument=r"on|off|\d{1,5}"),
    SlashCommand(
        "temp", "[0..2]", act="post", target="settings", field="temperature", argument=r"[01]?[.,]\d+|[012]|2[.,]0+"
    ),
    SlashCommand("regenerate", "", act="click", target="[data-regenerate]"),
    SlashCommand("continue", "", act="click", target="[data-continue]"),
    SlashCommand("summarize", "", PAGE, "post", "summarize"),
    SlashCommand("export", "[md|json|html]", PAGE, "go", "export/", argument="md|json|html"),
    SlashCommand("status", "", act="open", target="status-details"),
    SlashCommand("export", "FILE", TERMINAL),
    SlashCommand("save", "[FILE]", TERMINAL),
    SlashCommand("load", "FILE", TERMINAL),
    SlashCommand("model", "[NAME]", BOTH, "post", "/models/switch", "model", r".{1,80}"),
    SlashCommand("theme", "[light|dark|system]", PAGE, "choose", "theme", argument="light|dark|system"),
    SlashCommand("settings", "", PAGE, "open", "settings"),
    SlashCommand("system", "[TEXT|-]", TERMINAL),
    SlashCommand("exit", "", TERMINAL),
)


def commands_of(place: Place) -> tuple[SlashCommand, ...]:
    return tuple(command for command in SLASH_COMMANDS if place in command.places)


class Shortcut(NamedTuple):
    """A key combination, with modifiers named as in KeyboardEvent; `Control` is Command on a Mac."""

    # `where` is "anywhere", "outside" (not in a text input) or "empty" (in the message input while it is empty).
    # Letters and arrow keys without a modifier must not be "anywhere", because text inputs need them. A shortcut with a
    # `target` must not use a combination that edits text on some system, such as Option+Enter on a Mac.
    keys: str
    target: str = ""  # selector of the control to click; '' if the text input handles the key
    where: str = "anywhere"

    @property
    def does(self) -> str:
        return words[f"shortcut_{self.keys}"]


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut("Enter"),
    Shortcut("Shift+Enter"),
    Shortcut("Escape", "[data-stop]"),
    Shortcut("Shift+Escape", "#text"),
    Shortcut("Control+K", ".sidebar-head :is(button[commandfor=search], a[href$='/search'])"),
    Shortcut("Control+B", "[data-toggle-rail]"),
    Shortcut("Control+Shift+O", "#new-chat"),
    Shortcut("Control+Enter", "[data-regenerate]"),
    Shortcut("Control+Shift+Enter", "[data-continue]"),
    Shortcut("H", '[data-version="previous"]', "outside"),
    Shortcut("L", '[data-version="next"]', "outside"),
    Shortcut("K", '[data-user-message="before"]', "outside"),
    Shortcut("J", '[data-user-message="after"]', "outside"),
    Shortcut("ArrowUp", "[data-edit]", "empty"),
    Shortcut("Control+Shift+;", ".copy-code"),
    Shortcut("?", ".sidebar-foot [commandfor=help]", "outside"),
)
