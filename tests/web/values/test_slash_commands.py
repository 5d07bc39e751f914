"""The tables of slash commands and keyboard shortcuts: complete, documented and implemented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from notso.cli.slash_commands import _RUN
from notso.web.values.slash_commands import SHORTCUTS, SLASH_COMMANDS, commands_of

ON_THE_PAGE = (
    *("clear", "reset", "export", "thinking", "temp", "model", "help", "status", "theme", "settings"),
    *("summarize", "continue", "regenerate"),
)


def test_page_has_thirteen_commands() -> None:
    assert {command.name for command in commands_of("page")} == set(ON_THE_PAGE) and len(ON_THE_PAGE) == 13


def test_every_terminal_command_has_function() -> None:
    assert {command.name for command in commands_of("terminal")} == set(_RUN)


@pytest.mark.parametrize("command", SLASH_COMMANDS, ids=lambda command: command.name)
def test_command_has_short_description_and_valid_action(command: object) -> None:
    assert re.fullmatch(r"[a-z]+", command.name) and len(command.does) < 60 and not command.does.endswith(".")  # type: ignore[attr-defined]
    acts = {"", "open", "click", "post", "go", "choose", "thinking"}
    assert command.act in acts and ("page" in command.places) == bool(command.act)  # type: ignore[attr-defined]


def test_commands_and_keys_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "chat.md").read_text("utf-8")
    assert not [each.name for each in SLASH_COMMANDS if f"`/{each.name}" not in page]
    arrows = {"Control": "Ctrl", "Escape": "Esc", "ArrowUp": "↑", "ArrowDown": "↓", "ArrowLeft": "←", "ArrowRight": "→"}
    spelled = ["+".join(arrows.get(key, key) for key in shortcut.keys.split("+")) for shortcut in SHORTCUTS]
    assert not [keys for keys in spelled if keys not in page]


def test_shortcut_keys_are_unique() -> None:
    assert len({shortcut.keys for shortcut in SHORTCUTS}) == len(SHORTCUTS)
