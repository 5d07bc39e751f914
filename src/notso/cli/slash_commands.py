"""`notso chat`: hold the conversation, run slash commands, and save and load conversations."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from notso.cli import engines, terminal
from notso.cli.engines import model_file
from notso.cli.message_printer import MarkdownPrinter, MessagePrinter, PrintedMessage, collect
from notso.cli.terminal import Interruption
from notso.smollm3.values.engine_config import expand_home
from notso.system.files import file_type, write_private
from notso.text_file import read_regular
from notso.web.values.slash_commands import SlashCommand, commands_of

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.values.messages import Message
    from notso.smollm3.values.sampling_params import SamplingParams


@dataclass(slots=True)
class ChatSession:
    """A conversation of `notso chat`. Seeds are random unless `params.seed` is set."""

    engine: Engine
    params: SamplingParams
    open_engine: Callable[[Path | None, bool], Engine]
    system: str | None
    thinking: bool
    show_thinking: bool
    adapter: str | None
    is_first: bool = True  # still using the initial model, to which --adapter and --chat-template-file apply
    messages: list[Message] = field(default_factory=list)
    saved_as: Path | None = None
    context_used_tokens: int = 0

    def ask(self, question: str) -> PrintedMessage:
        """Generate and print the answer to a question, and add both to the conversation.

        Ctrl-C stops the answer and keeps the text generated so far; see `Interruption`.
        """
        from notso.smollm3.values.messages import Message

        messages = [*self.messages, Message("user", question)]
        answer = self._generate(messages)
        # The question is added only now, so that an engine error leaves the conversation unchanged.
        self.messages = [*messages, Message("assistant", answer.text, reasoning_content=answer.reasoning or None)]
        return answer

    def continue_answer(self) -> PrintedMessage | None:
        """Continue the last answer and print the continuation. Returns None if there is no answer."""
        if not self.messages or self.messages[-1].role != "assistant":
            return None
        last = self.messages[-1]
        answer = self._generate(self.messages, continue_last=True)
        reasoning = (last.reasoning_content or "") + answer.reasoning
        longer = dataclasses.replace(last, content=last.content + answer.text, reasoning_content=reasoning or None)
        self.messages = [*self.messages[:-1], longer]
        return answer

    def _generate(self, messages: Sequence[Message], *, continue_last: bool = False) -> PrintedMessage:
        from notso.smollm3.values.messages import Message
        from notso.smollm3.values.request_options import RequestOptions

        instructions = [Message("system", self.system)] if self.system else []
        params = self.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        printer_class = MarkdownPrinter if terminal.is_terminal(sys.stdout) else MessagePrinter
        printer = printer_class(show_reasoning=self.show_thinking)
        with Interruption() as interruption, terminal.suppress_key_echo():
            events = self.engine.generate(
                [*instructions, *messages],
                params,
                RequestOptions(thinking=self.thinking, adapter=self.adapter, continue_last=continue_last),
                cancelled=interruption.requested,
            )
            try:
                with terminal.waiting("processing the prompt") as answer_begins:
                    answer = collect(events, printer, answer_begins)
            finally:
                printer.finish()
        if answer.usage is not None:
            self.context_used_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return answer

    def switch_model(self, path: Path | None) -> str | None:
        """Load another model (None: the demo) and return the name of the adapter that no longer applies, if any.

        Raises NotsoError or OSError, in which case the previous model and adapter stay in use.
        """
        engines.check_model(path)
        previous, dropped_adapter = self.engine, self.adapter
        # Close the previous model first: two models may not fit in memory.
        previous.close()
        try:
            self.engine = self.open_engine(path, False)
        except BaseException:
            self.engine = self.open_engine(None if previous.info.is_demo else Path(previous.info.path), self.is_first)
            raise
        self.is_first, self.adapter = False, None  # an adapter applies only to the model that it was made for
        self.context_used_tokens = 0
        return dropped_adapter

    def clear(self) -> None:
        self.messages = []
        self.saved_as = None
        self.context_used_tokens = 0

    def remove_last_turn(self) -> str | None:
        while self.messages:
            message = self.messages[-1]
            self.messages = self.messages[:-1]
            if message.role == "user":
                return message.content
        return None

    def status_line(self) -> str:
        info = self.engine.info
        thinking = "thinking" if self.thinking else "not thinking"
        return (
            f"{info.name} | {thinking} | temperature {self.params.temperature:g} | "
            f"{self.context_used_tokens:,} / {info.context_tokens:,} tokens"
        )


class ExitChat(Exception):
    pass


@dataclass(frozen=True, slots=True)
class CommandResult:
    lines: tuple[str, ...] = ()
    question: str | None = None
    continues: bool = False


def run_command(conversation: ChatSession, line: str) -> CommandResult:
    """Run the slash command in a line. Raises ExitChat to end the chat."""
    name, _, argument = line[1:].partition(" ")
    aliases = {"quit": "exit", "think": "thinking", "temperature": "temp", "?": "help"}
    target = aliases.get(name.lower(), name.lower())
    for command in COMMANDS:
        if command.name == target:
            return _RUN[target](conversation, argument.strip())
    # An unknown command is probably a typing error, so it is not sent to the model.
    names = [command.name for command in COMMANDS]
    matches = [name for name in names if target and name.startswith(target)] or difflib.get_close_matches(target, names)
    hint = f"did you mean /{matches[0]}?" if matches else "/help lists the commands"
    return CommandResult((f"Unknown command /{name}; {hint} (start with // to send a message that begins with /)",))


def _help(conversation: ChatSession, argument: str) -> CommandResult:
    rows = [[f"/{command.name} {command.usage}".rstrip(), command.does] for command in COMMANDS]
    rows += [["/thinking hide|show", "Hide or show thinking"]]
    rows += [['"""', "Begin and end a multi-line message"], ["//...", "Send a message that begins with /"]]
    rows += [["Ctrl-C", "Stop generating; twice: quit"], ["Ctrl-D", "Quit"]]
    return CommandResult(tuple(terminal.columns(rows)))


def _clear(conversation: ChatSession, argument: str) -> CommandResult:
    conversation.clear()
    return CommandResult(("Conversation cleared.",))


def _thinking(conversation: ChatSession, argument: str) -> CommandResult:
    choices = {"on": (True, True), "off": (False, True), "hide": (True, False), "show": (True, True)}
    if argument == "":
        conversation.thinking = not conversation.thinking
    elif argument.lower() in choices:
        conversation.thinking, conversation.show_thinking = choices[argument.lower()]
    elif argument.isdecimal() and len(argument) < 11 and 0 < int(argument) < 1 << 31:
        conversation.thinking = True
        conversation.params = dataclasses.replace(conversation.params, thinking_budget=int(argument))
    else:
        return CommandResult((f"/thinking takes on, off, hide, show or a number of tokens, not {argument!r}.",))
    shown = "" if conversation.show_thinking else ", not shown"
    budget = conversation.params.thinking_budget
    limit = f", at most {budget:,} tokens" if conversation.thinking and budget is not None else ""
    return CommandResult((f"Thinking is {'on' if conversation.thinking else 'off'}{limit}{shown}.",))


def _temp(conversation: ChatSession, argument: str) -> CommandResult:
    from notso.smollm3.errors import InvalidRequestError

    if argument:
        try:
            conversation.params = dataclasses.replace(
                conversation.params, temperature=float(argument), given=(*conversation.params.given, "temperature")
            )
        except (InvalidRequestError, ValueError):
            return CommandResult((f"The temperature must be a number from 0 to 2, not {argument!r}.",))
    return CommandResult((f"The temperature is {conversation.params.temperature:g}.",))


def _system(conversation: ChatSession, argument: str) -> CommandResult:
    if argument:
        conversation.system = None if argument == "-" else argument
    return CommandResult((f"System prompt: {conversation.system}" if conversation.system else "No system prompt.",))


def _status(conversation: ChatSession, argument: str) -> CommandResult:
    lines = [engines.describe_model(conversation.engine.info), conversation.status_line()]
    notice = engines.demo_notice(conversation.engine.info)
    return CommandResult((*lines, notice) if notice else tuple(lines))


def _regenerate(conversation: ChatSession, argument: str) -> CommandResult:
    question = conversation.remove_last_turn()
    return (
        CommandResult(("There is no message to regenerate.",)) if question is None else CommandResult(question=question)
    )


def _continue(conversation: ChatSession, argument: str) -> CommandResult:
    return CommandResult(continues=True)


def _model(conversation: ChatSession, argument: str) -> CommandResult:
    from notso.smollm3.hub import registry

    if not argument:
        rows = [[each.name, terminal.gigabytes(each.size_bytes)] for each in registry.local_models()]
        return CommandResult((f"Using {conversation.engine.info.name}. Models:", *terminal.columns(rows, right=(1,))))
    path = Path(expand_home(argument))
    if not file_type(path):
        names = dict.fromkeys(each.name for each in registry.local_models() if argument.lower() in each.name.lower())
        found = [name for name in names if name.lower() == argument.lower()] or list(names)
        if len(found) != 1:
            several = f"Several models match: {', '.join(found)}" if found else f"No model is named {argument!r}"
            return CommandResult((f"{several}; /model lists them.",))
        path = Path(found[0])
    dropped = conversation.switch_model(model_file(path))
    unused = f"The adapter {dropped} belongs to the previous model and is not used." if dropped is not None else None
    notice = engines.demo_notice(conversation.engine.info)
    return CommandResult((engines.describe_model(conversation.engine.info), *filter(None, [unused, notice])))


def _save(conversation: ChatSession, argument: str) -> CommandResult:
    path = Path(expand_home(argument)) if argument else conversation.saved_as
    if path is None:
        return CommandResult(("/save requires the name of a file.",))
    return _write_messages(conversation, path, as_json, replace=path == conversation.saved_as, saves=True)


def _export(conversation: ChatSession, argument: str) -> CommandResult:
    if not argument:
        return CommandResult(("/export requires the name of a file: .md for Markdown, .json for messages.",))
    path = Path(expand_home(argument))
    return _write_messages(conversation, path, as_json if path.suffix == ".json" else as_markdown)


def _write_messages(
    conversation: ChatSession,
    path: Path,
    serialize: Callable[[Sequence[Message], str | None], str],
    *,
    replace: bool = False,
    saves: bool = False,
) -> CommandResult:
    if not conversation.messages:
        return CommandResult(("There are no messages to write.",))
    try:
        write_chat(path, serialize(conversation.messages, conversation.system), replace=replace)
    except ChatFileError as error:
        return CommandResult((f"Not written: {error}.",))
    conversation.saved_as = path if saves else conversation.saved_as
    return CommandResult((f"Wrote {terminal.counted(len(conversation.messages), 'message')} to {path}.",))


def _load(conversation: ChatSession, argument: str) -> CommandResult:
    if not argument:
        return CommandResult(("/load requires the name of a file.",))
    path = Path(expand_home(argument))
    try:
        loaded = read_chat(path)
    except ChatFileError as error:
        return CommandResult((f"Not loaded: {error}.",))
    conversation.clear()
    conversation.messages, conversation.system = loaded
    return CommandResult((f"Loaded {terminal.counted(len(loaded.messages), 'message')} from {path}.",))


def _exit(conversation: ChatSession, argument: str) -> CommandResult:
    raise ExitChat


_RUN: dict[str, Callable[[ChatSession, str], CommandResult]] = {
    "help": _help,
    "clear": _clear,
    "thinking": _thinking,
    "temp": _temp,
    "system": _system,
    "status": _status,
    "regenerate": _regenerate,
    "continue": _continue,
    "export": _export,
    "model": _model,
    "save": _save,
    "load": _load,
    "exit": _exit,
}
COMMANDS: tuple[SlashCommand, ...] = commands_of("terminal")


MAX_BYTES = 16 << 20  # maximum size of a saved chat, the same as for imports on the chat page


class LoadedChat(NamedTuple):
    messages: list[Message]
    system: str | None


class ChatFileError(Exception):
    """A file cannot be read or written; the message names the file."""


def write_chat(path: Path, content: str, *, replace: bool = False) -> None:
    """Write a file that only its owner can read. `replace`: overwrite an existing file. Raises ChatFileError."""
    try:
        write_private(Path(os.path.realpath(path)) if replace else path, content, replace=replace)
    except FileExistsError:
        raise ChatFileError(f"{path} already exists; use another name") from None
    except (OSError, ValueError) as error:
        raise ChatFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def as_json(messages: Sequence[Message], system: str | None) -> str:
    listed: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for each in messages:
        listed.append({"role": each.role, "content": each.content})
        if each.reasoning_content:
            listed[-1]["reasoning_content"] = each.reasoning_content
    return json.dumps({"messages": listed}, ensure_ascii=False, indent=1) + "\n"


def as_markdown(messages: Sequence[Message], system: str | None) -> str:
    from notso.web.values.wording import words

    names = {"user": words["you"], "assistant": words["assistant"]}
    parts = [f"> {line}".rstrip() for line in (system or "").splitlines()]
    head = ["\n".join(parts)] if parts else []
    return "\n\n".join([*head, *(f"## {names.get(m.role, m.role)}\n\n{m.content.strip()}" for m in messages)]) + "\n"


def read_chat(path: Path) -> LoadedChat:
    """Read a list of messages, or the newest chat in an export from the chat page. Raises ChatFileError."""
    from notso.smollm3.values.messages import Message
    from notso.web.chat.files.imports import read_chats
    from notso.web.store.tree import branch
    from notso.web.values.errors import Problem

    try:
        chats = read_chats(read_regular(path, MAX_BYTES), lambda text: text)
    except OSError as error:
        raise ChatFileError(f"{path}: {error.strerror or error}") from None
    except Problem as problem:
        raise ChatFileError(f"{path}: {problem.sentence.rstrip('.')}") from None
    if not chats:
        raise ChatFileError(f"{path} contains no chat")
    chat, stored = max(chats, key=lambda each: each[0].updated_ms)
    line = branch(stored, chat.chosen_root)
    messages = [Message(each.role, each.content, reasoning_content=each.reasoning or None) for each in line]
    return LoadedChat(messages, str(chat.settings.get("system_prompt") or "") or None)
