"""Slash commands of `notso chat`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass

from notso.cli import engines, terminal
from notso.cli.conversation import Conversation
from notso.web.values.slash_commands import SlashCommand, commands_of


class Leave(Exception):
    """Quits the chat."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lines to print, and a question to ask again."""

    lines: tuple[str, ...] = ()
    question: str | None = None


def run_command(conversation: Conversation, line: str) -> Outcome:
    """Run a line that begins with a slash. Raises Leave."""
    name, _, argument = line[1:].partition(" ")
    names = {"quit": "exit", "think": "thinking", "temperature": "temp", "?": "help"}
    wanted = names.get(name.lower(), name.lower())
    for command in COMMANDS:
        if command.name == wanted:
            return _RUN[wanted](conversation, argument.strip())
    # Unknown commands are not sent to the model.
    known = [command.name for command in COMMANDS]
    near = [name for name in known if wanted and name.startswith(wanted)] or difflib.get_close_matches(wanted, known)
    hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
    return Outcome((f"Unknown command /{name}; {hint} (start with // to send a message that begins with /)",))


def _help(conversation: Conversation, argument: str) -> Outcome:
    rows = [[f"/{command.name} {command.usage}".rstrip(), command.does] for command in COMMANDS]
    rows += [["/thinking hide|show", "Hide or show thinking"]]
    rows += [['"""', "Begin and end a multi-line message"], ["//...", "Send a message that begins with /"]]
    rows += [["Ctrl-C", "Stop generating; twice: quit"], ["Ctrl-D", "Quit"]]
    return Outcome(tuple(terminal.columns(rows)))


def _clear(conversation: Conversation, argument: str) -> Outcome:
    conversation.clear()
    return Outcome(("Conversation cleared.",))


def _thinking(conversation: Conversation, argument: str) -> Outcome:
    choices = {"on": (True, True), "off": (False, True), "hide": (True, False), "show": (True, True)}
    if argument == "":
        conversation.thinking = not conversation.thinking
    elif argument.lower() in choices:
        conversation.thinking, conversation.show_thinking = choices[argument.lower()]
    elif argument.isdecimal() and 0 < int(argument) < 1 << 31:
        conversation.thinking = True
        conversation.params = dataclasses.replace(conversation.params, thinking_budget=int(argument))
    else:
        return Outcome((f"/thinking takes on, off, a number of tokens, hide or show, not {argument!r}.",))
    shown = "" if conversation.show_thinking else ", not shown"
    budget = conversation.params.thinking_budget
    most = f", at most {budget:,} tokens" if conversation.thinking and budget is not None else ""
    return Outcome((f"Thinking is {'on' if conversation.thinking else 'off'}{most}{shown}.",))


def _temp(conversation: Conversation, argument: str) -> Outcome:
    from notso.smollm3.errors import InvalidRequestError

    if argument:
        try:
            conversation.params = dataclasses.replace(
                conversation.params, temperature=float(argument), given=(*conversation.params.given, "temperature")
            )
        except (InvalidRequestError, ValueError):
            return Outcome((f"The temperature must be a number from 0 to 2, not {argument!r}.",))
    return Outcome((f"The temperature is {conversation.params.temperature:g}.",))


def _system(conversation: Conversation, argument: str) -> Outcome:
    if argument:
        conversation.system = None if argument == "-" else argument
    return Outcome((f"System prompt: {conversation.system}" if conversation.system else "No system prompt.",))


def _status(conversation: Conversation, argument: str) -> Outcome:
    lines = [engines.title(conversation.engine.info), conversation.status_line()]
    notice = engines.demo_notice(conversation.engine.info)
    return Outcome((*lines, notice) if notice else tuple(lines))


def _regenerate(conversation: Conversation, argument: str) -> Outcome:
    question = conversation.take_back_turn()
    return Outcome(("There is no message to answer again.",)) if question is None else Outcome(question=question)


def _exit(conversation: Conversation, argument: str) -> Outcome:
    raise Leave


_RUN: dict[str, Callable[[Conversation, str], Outcome]] = {
    "help": _help,
    "clear": _clear,
    "thinking": _thinking,
    "temp": _temp,
    "system": _system,
    "status": _status,
    "regenerate": _regenerate,
    "exit": _exit,
}
COMMANDS: tuple[SlashCommand, ...] = commands_of("terminal")
