"""`notso chat`: chat in the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.options import add_sampling_options, params_from
from notso.cli.slash_commands import COMMANDS, ChatSession, CommandResult, ExitChat, run_command
from notso.text_file import encoding_of

EXAMPLES = """\
  notso chat
  notso chat --no-think --system "Answer in French.\""""

_COMMAND = exit_codes.Command("chat")
_FENCE = '"""'
ReadLine = Callable[[str], str]
"""Function that shows a prompt and reads a line. Raises EOFError at the end of input, KeyboardInterrupt on Ctrl-C."""


@add_sampling_options
def chat(
    model: options.Model = None,
    fetch: options.Fetch = False,
    system: options.System = None,
    no_think: options.NoThink = False,
    hide_thinking: options.HideThinking = False,
    chat_template_file: options.ChatTemplateFile = None,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    adapter: options.Adapters = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
    **sampling: Any,
) -> None:
    """Chat in the terminal. Thinking is shown dimmed; `/help` lists the commands."""
    params = params_from(sampling)
    adapters = adapter or []
    active_adapter = engines.active_adapter(adapters)
    load = partial(engines.open_engine, context_tokens=context, threads=threads, kv=kv, device=device)
    engine = load(model, adapters=adapters, chat_template_file=chat_template_file, fetch=fetch)
    conversation: ChatSession | None = None
    try:
        conversation = ChatSession(
            engine,
            params,
            system=system,
            thinking=not no_think,
            show_thinking=not hide_thinking,
            adapter=active_adapter,
            open_engine=lambda path, is_first: load(
                path,
                adapters=adapters if is_first else (),
                chat_template_file=chat_template_file if is_first else None,
            ),
        )
        terminal.note(engines.describe_model(engine.info))
        if notice := engines.demo_notice(engine.info):
            terminal.note(notice)
        terminal.note("/help lists the commands; Ctrl-D quits.")
        converse(conversation, _line_reader(conversation))
    finally:
        (engine if conversation is None else conversation.engine).close()


def converse(conversation: ChatSession, read_line: ReadLine) -> None:
    interrupted = False
    while True:
        try:
            text = _read_message(read_line)
            interrupted = bool(text.strip()) and _process_message(conversation, text)
        except (EOFError, ExitChat):
            return
        except KeyboardInterrupt:
            if interrupted:
                raise typer.Exit(exit_codes.INTERRUPTED) from None
            interrupted = True
            terminal.note("Press Ctrl-C again to quit.")


def _process_message(conversation: ChatSession, text: str) -> bool:
    from notso.qtensor import NotsoError

    outcome, messages = CommandResult(question=text), conversation.messages
    try:
        if text.startswith("//"):
            outcome = CommandResult(question=text[1:])
        elif text.startswith("/"):
            outcome = run_command(conversation, text.strip())
        for line in outcome.lines:
            terminal.note(line)
        if outcome.question is None and not outcome.continues:
            return False
        try:
            answer = conversation.continue_answer() if outcome.question is None else conversation.ask(outcome.question)
        except BaseException:
            conversation.messages = messages  # restore the turn that /regenerate has removed
            raise
    except (NotsoError, OSError) as error:
        _, line = exit_codes.explain(error, _COMMAND)
        terminal.print_error(line)
        return False
    if answer is None:
        terminal.note("There is no answer to continue.")
        return False
    if answer.finish_reason == "cancelled":
        terminal.note("Stopped. Press Ctrl-C again to quit.")
    elif answer.finish_reason == "length":
        is_full = conversation.params.max_tokens is None
        remedy = "/clear frees the context" if is_full else "/continue resumes it"
        terminal.note(f"The answer reached the maximum length; {remedy}.")
    return answer.finish_reason == "cancelled"


def _read_message(read_line: ReadLine) -> str:
    line = read_line("> ")
    if not line.strip().startswith(_FENCE):
        return line
    text = line.strip()[len(_FENCE) :]
    with contextlib.suppress(EOFError):
        while not text.endswith(_FENCE):
            text += "\n" + read_line("  ").rstrip()
    return text.removesuffix(_FENCE).strip("\n")


def _line_reader(conversation: ChatSession) -> ReadLine:
    if not (sys.stdin.isatty() and terminal.is_terminal(sys.stdout)):
        return _plain_line_reader()
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output.color_depth import ColorDepth

    commands = WordCompleter([f"/{command.name}" for command in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(),  # the input history must not be written to disk
        completer=commands,
        complete_while_typing=True,
        bottom_toolbar=conversation.status_line,
        color_depth=None if terminal.has_color(sys.stdout) else ColorDepth.DEPTH_1_BIT,
    )
    return lambda prompt: session.prompt(prompt, enable_suspend=True)


def _plain_line_reader() -> ReadLine:
    stdin = sys.stdin
    is_started = stdin.isatty()

    def read_line(prompt: str) -> str:
        nonlocal is_started
        if stdin.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        if not is_started and isinstance(stdin, io.TextIOWrapper) and isinstance(stdin.buffer, io.BufferedReader):
            # `peek` waits only for the first bytes: a program that sends lines through a pipe may wait for the answer
            # to each line before it sends the next one.
            encoding = encoding_of(stdin.buffer.peek())
            if encoding != "utf-8":
                stdin.reconfigure(encoding=encoding, errors="replace")
        is_started = True
        line = stdin.readline()
        if not line:
            raise EOFError
        return line.removeprefix("\ufeff").rstrip("\n\0")

    return read_line
