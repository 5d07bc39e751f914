"""The keys of the page: one table for the help sheet, from which the page's script reads it."""

from __future__ import annotations

from typing import NamedTuple


class Shortcut(NamedTuple):
    """A key and the last element that it presses. `keys` begins with modifiers as KeyboardEvent names them.

    `Control` is Command on a Mac. Keys without a modifier count only where no text is being written, or in an empty
    input (`where` is "empty"). An empty `target`: the key is the input's own matter and is only listed.
    """

    keys: str
    does: str
    target: str = ""
    where: str = "anywhere"


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut("Enter", "sends"),
    Shortcut("Shift+Enter", "begins a new line"),
    Shortcut("Escape", "stops the answer, leaves an edit", "[data-stop]"),
    Shortcut("Shift+Escape", "goes to the input", "#text"),
    Shortcut("Control+K", "searches all chats", ".sidebar-head [popovertarget=search]"),
    Shortcut("Control+Shift+O", "begins a new chat", "#new-chat"),
    Shortcut("Control+Enter", "answers the last question anew, sends an edit", "[data-regenerate]"),
    Shortcut("Alt+Enter", "goes on with the last answer", "[data-continue]"),
    Shortcut("Alt+ArrowLeft", "shows the version before", '[data-version="previous"]'),
    Shortcut("Alt+ArrowRight", "shows the version after", '[data-version="next"]'),
    Shortcut("Alt+ArrowUp", "goes to the question before", '[data-user-message="before"]'),
    Shortcut("Alt+ArrowDown", "goes to the question after", '[data-user-message="after"]'),
    Shortcut("ArrowUp", "in an empty input: edits the last question", "[data-edit]", "empty"),
    Shortcut("Control+Shift+;", "copies the last code block", ".copy-code"),
    Shortcut("?", "outside the input: shows this help", ".sidebar-foot [popovertarget=help]", "outside"),
)
