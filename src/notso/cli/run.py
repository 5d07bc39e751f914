"""`notso run`: answer one prompt."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from notso.cli import engines, exit_codes, options, terminal
from notso.cli.message_printer import MessagePrinter, PrintedMessage, collect, speed_line
from notso.cli.options import add_sampling_options, params_from
from notso.cli.terminal import Interruption
from notso.text_file import NotTextError, decode_text

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.values.messages import Message
    from notso.smollm3.values.request_options import RequestOptions
    from notso.smollm3.values.sampling_params import SamplingParams

EXAMPLES = """\
  notso run "Why is the sky blue?"
  cat notes.txt | notso run --no-think "Summarize this:" -"""

_MAX_SCHEMA_BYTES = 1 << 20
_MAX_PROMPT_BYTES = 64 << 20


@add_sampling_options
def run(
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompt; `-` inserts stdin.")] = None,
    model: options.Model = None,
    fetch: options.Fetch = False,
    system: options.System = None,
    no_think: options.NoThink = False,
    hide_thinking: options.HideThinking = False,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", metavar="FILE", help="Constrain the answer to this JSON schema.", show_default=False),
    ] = None,
    chat_template_file: options.ChatTemplateFile = None,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    adapter: options.Adapters = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            metavar="FILE",
            help="Write a receipt of the answer, for `notso verify --receipt`.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print token counts, speed and fingerprint to stderr.")
    ] = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
    **sampling: Any,
) -> None:
    """Answer one prompt on stdout; thinking goes to stderr."""
    from notso.smollm3.values.messages import Message
    from notso.smollm3.values.request_options import Grammar, RequestOptions

    if receipt is not None:
        options.check_output_path(receipt, True, "--receipt", replaces=False)
    question = _read_prompt(prompt)
    adapters = adapter or []
    active_adapter = engines.active_adapter(adapters)
    params = params_from(sampling)
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    grammar = None
    if schema is not None:
        grammar = Grammar("json_schema", options.read_text(schema, "--schema", _MAX_SCHEMA_BYTES))
    messages = [Message("system", _require_utf8(system, "--system"))] if system else []
    messages.append(Message("user", question))
    engine = engines.open_engine(
        model,
        context_tokens=context,
        threads=threads,
        kv=kv,
        device=device,
        silent=as_json,
        adapters=adapters,
        chat_template_file=chat_template_file,
        fetch=fetch,
    )
    with Interruption() as interruption:
        try:
            request_options = RequestOptions(
                thinking=not no_think, grammar=grammar, adapter=active_adapter, token_ids=receipt is not None
            )
            answer = _answer(engine, messages, params, request_options, interruption, hide_thinking, as_json)
            # Print the answer before writing the receipt, so that the answer is not lost if writing fails.
            if as_json:
                terminal.print_json(_as_json(engine, answer, params))
            elif stats:
                terminal.note(f"{speed_line(answer)}; fingerprint {_fingerprint(answer)}")
            if receipt is not None:
                _write_receipt(engine, messages, params, request_options, answer, receipt)
        finally:
            engine.close()
    if interruption.requested():
        raise typer.Exit(exit_codes.INTERRUPTED)
    if answer.finish_reason != "length":
        return
    if not as_json:
        where = "during thinking" if not no_think and not answer.text.strip() else "at the token limit"
        terminal.note(f"The answer was cut off {where}: raise --max-tokens or --context.")
    raise typer.Exit(exit_codes.CUT)


def _answer(
    engine: Engine,
    messages: list[Message],
    params: SamplingParams,
    options: RequestOptions,
    interruption: Interruption,
    hide_thinking: bool,
    as_json: bool,
) -> PrintedMessage:
    notice = engines.demo_notice(engine.info)
    if notice and not as_json:
        terminal.note(notice)
    printer = None if as_json else MessagePrinter(show_reasoning=not hide_thinking)
    events = engine.generate(messages, params, options, cancelled=interruption.requested)
    try:
        with terminal.waiting("processing the prompt", silent=as_json) as answer_begins:
            return collect(events, printer, answer_begins)
    finally:
        if printer is not None:
            printer.finish()


def _write_receipt(
    engine: Engine,
    messages: list[Message],
    params: SamplingParams,
    options: RequestOptions,
    answer: PrintedMessage,
    path: Path,
) -> None:
    from notso.smollm3.values.request_options import Replay

    replay = Replay(tuple(answer.ids), tuple(answer.closed_at))
    content = engine.receipt(messages, params, replace(options, replay=replay))
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _read_prompt(arguments: list[str] | None) -> str:
    if not arguments and sys.stdin.isatty():
        raise typer.BadParameter("no prompt given: pass one as an argument or pipe it to stdin", param_hint="PROMPT")
    parts = [_read_stdin() if argument == "-" else argument for argument in arguments or ["-"]]
    separator = "\n\n" if arguments and "-" in arguments else " "
    question = _require_utf8(separator.join(part for part in parts if part), "PROMPT")
    if not question.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    return question


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise typer.BadParameter(f"stdin is larger than {_MAX_PROMPT_BYTES >> 20} MiB", param_hint="PROMPT")
    try:
        return decode_text(data).rstrip("\n")
    except NotTextError as error:
        raise typer.BadParameter(f"stdin {error}", param_hint="PROMPT") from None


def _require_utf8(text: str, name: str) -> str:
    # Python decodes invalid UTF-8 in an argument to surrogates, which cannot be encoded.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("not valid UTF-8 text", param_hint=name) from None
    return text


def _fingerprint(answer: PrintedMessage) -> str:
    from notso.smollm3.diagnostics.verification import answer_fingerprint

    return answer_fingerprint(answer.reasoning, answer.text)


def _as_json(engine: Engine, answer: PrintedMessage, params: SamplingParams) -> dict[str, Any]:
    usage = answer.usage
    rate = usage.completion_tokens * 1000 / usage.completion_ms if usage and usage.completion_ms > 0 else None
    return {
        "model": engine.info.name,
        "demo": engine.info.is_demo,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in answer.tool_calls],
        "finish_reason": answer.finish_reason,
        "seed": params.seed,
        "fingerprint": _fingerprint(answer),
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "cached_tokens": usage.cached_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "timings": {
            "prompt_ms": round(usage.prompt_ms, 3) if usage else None,
            "completion_ms": round(usage.completion_ms, 3) if usage else None,
            "first_token_ms": round(answer.first_token_ms, 3),
            "total_ms": round(answer.total_ms, 3),
            "tokens_per_second": round(rate, 3) if rate else None,
        },
    }
