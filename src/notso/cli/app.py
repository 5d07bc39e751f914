"""Run the `notso` command: select the subcommand and report its errors."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from notso.cli import (
    backup,
    batch,
    bench,
    chat,
    cluster,
    config_file,
    convert,
    dataset,
    doctor,
    documents,
    exit_codes,
    inspect,
    keys,
    list,
    perplexity,
    plugin,
    pull,
    quantize,
    rm,
    run,
    serve,
    store,
    synth,
    terminal,
    tune,
    verify,
)

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _show_version(requested: bool) -> None:
    if requested:
        terminal.print_line(version_line())
        raise typer.Exit()


def version_line() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("notso-smollm3-bot")
    except PackageNotFoundError:
        release = "(not installed)"
    try:
        from notso.qtensor import kernel_choice

        kernels = str(kernel_choice.kernels())
    except Exception as error:  # --version must work even if the build is broken
        kernels = f"unavailable: {type(error).__name__}"
    return f"notso {release} (kernels {kernels}; reads GGUF 2 and 3; Python {sys.version.split()[0]})"


@app.callback()
def root_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Run SmolLM3-3B locally and offline: in the browser, in the terminal, or through an API. Without a command, notso
    opens the chat in the browser and takes the options of `serve`, for example `notso --model FILE --port 8080`."""
    from notso.cli import notices

    notices.install()


VERBS: dict[str, Callable[..., None]] = {
    "serve": serve.serve,
    "chat": chat.chat,
    "run": run.run,
    "batch": batch.batch,
    "backup": backup.backup,
    "store": store.store,
    "documents": documents.documents,
    "cluster": cluster.cluster,
    "pull": pull.pull,
    "convert": convert.convert,
    "quantize": quantize.quantize,
    "dataset": dataset.dataset,
    "tune": tune.tune,
    "list": list.list_models,
    "rm": rm.remove_model,
    "inspect": inspect.inspect,
    "verify": verify.verify,
    "perplexity": perplexity.perplexity,
    "synth": synth.synthesise,
    "plugin": plugin.plugin,
    "keys": keys.keys,
    "bench": bench.bench,
    "doctor": doctor.doctor,
}
for _name, _command in VERBS.items():
    app.command(_name, epilog=f"\b\nExamples:\n{sys.modules[_command.__module__].EXAMPLES}")(_command)
app.command("quantise", hidden=True)(quantize.quantize)  # the command's name in earlier releases


_SERVERS = ("serve", "cluster")  # they handle signals themselves


def _drop_service_links() -> None:
    # For a Service called `notso`, Kubernetes sets NOTSO_PORT=tcp://ADDRESS:PORT. NOTSO_PORT is also the environment
    # variable of --port, which must be a number.
    for name, value in os.environ.copy().items():
        is_ours = name.startswith("NOTSO_") and name.endswith("PORT")
        if is_ours and value.startswith(("tcp://", "udp://", "sctp://")):
            del os.environ[name]


def _replace_missing_home() -> None:
    # Containers may run under a user id without an account. Commands that need no home directory must work in them.
    if not Path(os.environ.get("HOME", "")).is_absolute():
        os.environ.pop("HOME", None)
        home = os.path.expanduser("~")  # noqa: PTH111 - raises no error
        os.environ["HOME"] = "/nonexistent" if home == "~" else home


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: sys.argv) and return its exit code."""
    terminal.prepare_streams()
    _drop_service_links()
    _replace_missing_home()
    args = [*(sys.argv[1:] if arguments is None else arguments)]
    command = exit_codes.ANY_COMMAND
    try:
        group: Any = typer.main.get_command(app)
        args = [*_insert_default_command(group, args)]
        command = command_of(group, args)
        config = config_file.read_config(group)
        with contextlib.nullcontext() if command.verb in _SERVERS else terminal.clean_up_on_signals():
            # Let errors propagate to the handler below, which prints one line and determines the exit code.
            outcome = group.main(args=args, prog_name="notso", standalone_mode=False, default_map=config)
        code = outcome if isinstance(outcome, int) else exit_codes.DONE
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else exit_codes.FAILED
        if isinstance(stop.__context__, BrokenPipeError):  # typer exits in this way if stdout is a closed pipe
            terminal.abandon_stdout()
            code = exit_codes.OUTPUT_CLOSED
    except BaseException as error:
        code = _report_error(error, command)
    return _flush(code)


def _insert_default_command(group: Any, args: Sequence[str]) -> Sequence[str]:
    # Insert `serve` if the command line is empty or begins with an option of `serve`.
    if not args:
        return ["serve"]
    first = args[0]
    options = {name for each in group.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    own_options = {*group.context_settings["help_option_names"], *(name for each in group.params for name in each.opts)}
    # An option and its value may be a single word: `-mFILE`, `--model=FILE`.
    name = first.partition("=")[0] if first.startswith("--") else first[:2]
    if not name.startswith("-") or name in own_options:
        return args
    # Also insert `serve` before a misspelled option, because the error message of `serve` suggests the correct one.
    return ["serve", *args] if name in options or difflib.get_close_matches(name, options, cutoff=0.8) else args


def command_of(group: Any, args: Sequence[str]) -> exit_codes.Command:
    """Return the command and its options, which determine the advice in error messages."""
    verb = args[0] if args else "serve"
    if verb not in group.commands:
        return exit_codes.ANY_COMMAND
    options = (each.name for each in group.commands[verb].params if each.param_type_name == "option")
    return exit_codes.Command(verb, frozenset(map(str, options)))


def _report_error(error: BaseException, command: exit_codes.Command) -> int:
    if isinstance(error, typer.TyperException):
        code, line = error.exit_code, _usage_line(error)
    elif isinstance(error, typer.Abort | KeyboardInterrupt):
        code, line = exit_codes.INTERRUPTED, ""
    else:
        if exit_codes.debugging():
            sys.stderr.write(terminal.escape_control(exit_codes.format_traceback(error)))
        code, line = exit_codes.explain(error, command)
    if line:
        terminal.print_error(line)
    return code


def _usage_line(error: typer.TyperException) -> str:
    message = error.format_message().replace(": Value error, ", ": ")  # pydantic adds these words
    context = getattr(error, "ctx", None)
    # click suggests similar names for unknown options and commands.
    nearest: Sequence[str] = getattr(error, "possibilities", None) or ()
    if nearest:
        message = f"{error.message.rstrip('.')}. Did you mean {nearest[0]}?"
    command = context.command_path if context is not None else "notso"
    parameter: Any = getattr(error, "param", None)
    if context is not None and parameter is not None:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "ENVIRONMENT" and parameter.envvar not in message:
            message += f" [env: {parameter.envvar}]"
    return f"{' '.join(message.split())} (`{command} --help` shows the options)"


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
        if isinstance(sys.stdout, terminal.NullStream) and sys.stdout.has_lost_text and code == exit_codes.DONE:
            code = exit_codes.OUTPUT_CLOSED
    except BrokenPipeError:
        terminal.abandon_stdout()
        code = exit_codes.OUTPUT_CLOSED
    except OSError as error:
        terminal.abandon_stdout()
        reported = code
        code, line = exit_codes.explain(error)
        if code != reported:  # if equal, the error was probably reported when the command wrote to stdout
            terminal.print_error(line)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    return code
