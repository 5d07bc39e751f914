"""The keys of the page: one table for the help sheet, from which the page's script reads it."""

from __future__ import annotations

from typing import NamedTuple

from notso.web.values.wording import words


class Shortcut(NamedTuple):
    """A key and the last element that it presses. `keys` begins with modifiers as KeyboardEvent names them.

    `Control` is Command on a Mac. Keys without a modifier count only where no text is being written, or in an empty
    input (`where` is "empty"). An empty `target`: the key is the input's own matter and is only listed.
    """

    keys: str
    target: str = ""
    where: str = "anywhere"

    @property
    def does(self) -> str:
        """What it does, in a few words."""
        return words[f"shortcut_{self.keys}"]


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut("Enter"),
    Shortcut("Shift+Enter"),
    Shortcut("Escape", "[data-stop]"),
    Shortcut("Shift+Escape", "#text"),
    Shortcut("Control+K", ".sidebar-head [popovertarget=search]"),
    Shortcut("Control+Shift+O", "#new-chat"),
    Shortcut("Control+Enter", "[data-regenerate]"),
    Shortcut("Alt+Enter", "[data-continue]"),
    Shortcut("Alt+ArrowLeft", '[data-version="previous"]'),
    Shortcut("Alt+ArrowRight", '[data-version="next"]'),
    Shortcut("Alt+ArrowUp", '[data-user-message="before"]'),
    Shortcut("Alt+ArrowDown", '[data-user-message="after"]'),
    Shortcut("ArrowUp", "[data-edit]", "empty"),
    Shortcut("Control+Shift+;", ".copy-code"),
    Shortcut("?", ".sidebar-foot [popovertarget=help]", "outside"),
)
