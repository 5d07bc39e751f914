"""Keyboard shortcuts for the help sheet; the page's script reads them from there."""

from __future__ import annotations

from typing import NamedTuple

from notso.web.values.wording import words


class Shortcut(NamedTuple):
    """A key combination, with modifiers named as in KeyboardEvent; `Control` is Command on a Mac."""

    # Keys without modifier apply outside of text input, or in an empty input (`where` is "empty"). No combination is
    # one that edits text on some system: on a Mac, Option with an arrow or Enter is.
    keys: str
    target: str = ""  # selector, of which the last element is pressed; '': handled by the input, only listed
    where: str = "anywhere"

    @property
    def does(self) -> str:
        return words[f"shortcut_{self.keys}"]


SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut("Enter"),
    Shortcut("Shift+Enter"),
    Shortcut("Escape", "[data-stop]"),
    Shortcut("Shift+Escape", "#text"),
    Shortcut("Control+K", ".sidebar-head :is(button[commandfor=search], a[href='/search'])"),
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
