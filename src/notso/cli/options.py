"""Define the options that several commands share: names, help texts and validation.

Sampling options of `run` and `chat`, and settings of `serve`, are generated from field metadata.
"""

from __future__ import annotations

import errno
import inspect
import os
import stat
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from notso.smollm3.values.engine_config import MAX_NUM_SEQS, MAX_THREADS, KVChoice, Placement
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams
from notso.system.files import file_type
from notso.text_file import SECRET_BYTES, NotTextError, decode_text
from notso.web.values.settings import OPTIONS, Option, Settings


def _store_in_environment(variable: str) -> Callable[[bool], bool]:
    # --debug and --plain have effects outside the command: the error handler reads NOTSO_DEBUG after the command has
    # ended, and `terminal` reads NOTSO_PLAIN.
    def store(value: bool) -> bool:
        if value:
            os.environ[variable] = "1"
        return value

    return store


def env_option(*flags: str, variable: str, help: str, show_default: bool = False, **details: Any) -> Any:
    """Return an option with a help text that names its environment variable."""
    text = f"{help.removesuffix('.')} [env: {variable}]." if variable else help
    return typer.Option(
        *flags, envvar=variable or None, help=text, show_envvar=False, show_default=show_default, **details
    )


Debug = Annotated[
    bool, typer.Option("--debug", callback=_store_in_environment("NOTSO_DEBUG"), help="Show the traceback of an error.")
]
Plain = Annotated[
    bool,
    typer.Option("--plain", callback=_store_in_environment("NOTSO_PLAIN"), help="Disable colors and progress bars."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Model = Annotated[
    Path | None,
    env_option(
        "--model",
        "-m",
        variable="NOTSO_MODEL",
        metavar="FILE",
        help="Model file or folder, or a name shown by `notso list` or accepted by `notso pull`.",
    ),
]
Fetch = Annotated[
    bool,
    env_option("--fetch", variable="NOTSO_FETCH", help="Download the model if it is not installed.", show_default=True),
]
Context = Annotated[
    int | None,
    env_option(
        "--context",
        variable="NOTSO_CONTEXT",
        metavar="TOKENS",
        min=16,
        help="Context length. Default: 8192, or less if memory is low.",
    ),
]
Threads = Annotated[
    int | None,
    env_option(
        "--threads",
        variable="NOTSO_THREADS",
        metavar="N",
        min=1,
        max=MAX_THREADS,
        help="Compute threads. Default: one per physical core.",
    ),
]
Device = Annotated[
    str,
    env_option(
        "--device", variable="NOTSO_DEVICE", metavar="DEVICE", help="Compute device: auto, cpu, cuda or cuda:N."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="NAME=FILE[:SCALE]", help="LoRA adapter to load; repeatable.", show_default=False
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    env_option(
        "--chat-template-file",
        variable="NOTSO_CHAT_TEMPLATE_FILE",
        metavar="FILE",
        help="Jinja template that replaces the one in the model file.",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="NAME[:sign-in]",
        help="Plugin to enable; repeatable. With :sign-in, it also authenticates users.",
        show_default=False,
    ),
]
Weights = Annotated[
    Placement,
    env_option(
        "--weights",
        variable="NOTSO_WEIGHTS",
        help="Use the mapped file (mmap) or copy weights to huge pages (packed, alias hugepages); auto chooses.",
    ),
]
KV = Annotated[
    KVChoice,
    env_option("--kv", variable="NOTSO_KV", help="KV cache type; auto: chosen to suit model, context and memory."),
]
MaxNumSeqs = Annotated[
    int | None,
    env_option(
        "--max-num-seqs",
        variable="NOTSO_MAX_NUM_SEQS",
        metavar="N",
        min=1,
        max=MAX_NUM_SEQS,
        help="Maximum number of concurrent requests. Default: 16, or fewer if memory is low.",
    ),
]


def _disk_option(flag: str, variable: str, what: str) -> Any:
    text = f"Size limit of the on-disk prompt cache{what}, in GB."
    return env_option(flag, variable=variable, metavar="GB", min=0, max=1_000_000, help=text, show_default=True)


CacheDisk = Annotated[float, _disk_option("--cache-disk", "NOTSO_CACHE_DISK", "")]
LibraryDisk = Annotated[float, _disk_option("--library-disk", "NOTSO_LIBRARY_DISK", " for documents")]


def option_for_setting(name: str) -> Any:
    each = OPTIONS[name]
    return env_option(
        "--" + each.name.replace("_", "-"),
        *filter(None, [each.short]),
        variable=each.variable,
        metavar=each.metavar or None,
        help=each.help,
        min=each.low,
        max=each.high,
        exists=each.is_folder,
        file_okay=not each.is_folder,
        show_default=isinstance(each.default, int | float | str) and bool(each.default),
    )


DataDir = Annotated[Path | None, option_for_setting("data_dir")]
DatabaseUrl = Annotated[str | None, option_for_setting("database_url")]
AllowHost = Annotated[list[str] | None, option_for_setting("allowed_hosts")]
TrustProxy = Annotated[list[str] | None, option_for_setting("trusted_proxies")]
ApiKeyFile = Annotated[
    Path | None,
    env_option(
        "--api-key-file",
        variable="NOTSO_API_KEY_FILE",
        metavar="FILE",
        help="Read the API key from this file.",
        show_default=True,
    ),
]


def duration(text: str, option: str) -> float:
    """Parse a duration and return it in seconds. Raises typer.BadParameter."""
    from notso.web.values.durations import parse_duration

    seconds = parse_duration(text)
    if seconds is None:
        raise typer.BadParameter(
            "use a number of seconds or a duration such as 30s, 5m or 1h30m; -1 means forever", param_hint=option
        )
    return seconds


System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="System prompt.", show_default=False)
]
NoThink = Annotated[bool, typer.Option("--no-think", help="Disable thinking.")]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show the thinking.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file.")]


class PluginChoice(NamedTuple):
    """Enabled plugins; `sign_in` names the one that authenticates users."""

    names: tuple[str, ...]
    sign_in: str | None


def plugins(values: list[str] | None) -> PluginChoice:
    """Parse `--plugin` values. Raises typer.BadParameter."""
    sign_in = None
    names = []
    for each in values or ():
        name, _, role = each.partition(":")
        if role and (role != "sign-in" or sign_in is not None):
            raise typer.BadParameter(
                f"{each}: the only role is sign-in, and only one plugin can have it", param_hint="--plugin"
            )
        sign_in = name if role else sign_in
        names.append(name)
    return PluginChoice(tuple(dict.fromkeys(names)), sign_in)


def api_key(file: Path | None) -> str | None:
    """Return the key from `file` or NOTSO_API_KEY. Raises typer.BadParameter."""
    if file is None:
        return os.environ.get("NOTSO_API_KEY") or None
    key = read_text(file, "--api-key-file", SECRET_BYTES).strip()
    if not key:
        # An empty file must be an error: without a key, the server would accept every request.
        raise typer.BadParameter(f"{file} is empty", param_hint="--api-key-file")
    return key


def engine_key() -> str:
    """Return NOTSO_ENGINE_KEY. Raises typer.BadParameter if it is not set."""
    key = os.environ.get("NOTSO_ENGINE_KEY", "")
    if not key:
        raise typer.BadParameter(
            "NOTSO_ENGINE_KEY is not set: give the engine and its front ends the same key of at least 16 characters"
        )
    return key


# Options of `serve` that do not apply to front ends (servers without an engine).
ENGINE_OPTIONS = (
    *("model", "fetch", "context", "kv", "threads", "device", "weights", "chat_template_file", "adapter"),
    *("max_num_seqs", "cache_disk", "library_disk"),
    *(each.name for each in OPTIONS.values() if each.of_the_engine),
)


def reject_engine_options(context: typer.Context) -> None:
    """Raise typer.BadParameter if one of ENGINE_OPTIONS is set."""
    for name in ENGINE_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option} does not apply to a front end: pass it to the engine server")


Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


def check_output_path(out: Path, force: bool, name: str, *, replaces: bool = True) -> None:
    """Raise typer.BadParameter if the output file `out` cannot be written, or exists and `force` is false."""
    # replaces: whether `out` is replaced by a new file rather than written in place. Replacing /dev/null or /dev/stdout
    # would break other programs.
    found_type = file_type(out)
    if stat.S_ISDIR(found_type):
        raise typer.BadParameter(f"{out} is a folder", param_hint=name)
    if replaces and found_type and not stat.S_ISREG(found_type):
        raise typer.BadParameter(f"{out} is not a regular file", param_hint=name)
    if found_type and not force:
        raise typer.BadParameter(f"{out} already exists; use --force to overwrite it", param_hint=name)
    if not stat.S_ISDIR(file_type(out.parent)):
        raise typer.BadParameter(f"folder {out.parent} does not exist; create it first", param_hint=name)


def check_distinct_outputs(first: Path, second: Path, name: str) -> None:
    """Raise typer.BadParameter if both output files are the same."""
    if os.path.realpath(first) == os.path.realpath(second):
        raise typer.BadParameter(f"{second} is already the other output file", param_hint=name)


_MAX_TEXT_BYTES = 1 << 30


def read_text(path: Path, name: str, max_bytes: int = _MAX_TEXT_BYTES) -> str:
    """Read a text file or pipe and decode it with `decode_text`. Raises typer.BadParameter."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes >> 10:,} KiB")
        return decode_text(content)
    except NotTextError as error:
        raise typer.BadParameter(f"{path} {error}", param_hint=name) from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=name) from None


def add_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `**sampling` with one option per sampling parameter."""
    return _with_options(command, _sampling_options())


def add_setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `**setting_options` with one option per setting."""
    return _with_options(command, _setting_options())


def params_from(sampling: Mapping[str, Any]) -> SamplingParams:
    """Create SamplingParams from the options that were passed. Raises InvalidRequestError."""
    # False and [] mean that the flag or list was not passed, but 0 is a value that was passed.
    passed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in sampling.items()
        if value is not None and value is not False and value != []
    }
    return SamplingParams(**passed, given=tuple(passed))


def settings_from(options: Mapping[str, Any], **more: Any) -> Settings:
    """Create Settings from `more` and the options of `add_setting_options`. Raises SettingsError or
    typer.BadParameter."""
    return Settings(
        **more, **{name: _parse_setting(each, options[each.name]) for name, each in OPTIONS.items() if each.help}
    )


def _with_options(command: Callable[..., None], added: Iterable[tuple[str, inspect.Parameter]]) -> Callable[..., None]:
    # Changing the signature is sufficient, because typer reads the options from it and passes every value by keyword.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    expanded = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in parameters
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for after, option in added:
        expanded.insert([each.name for each in expanded].index(after) + 1, option)
    command.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _sampling_options() -> Iterator[tuple[str, inspect.Parameter]]:
    before = "hide_thinking"
    for name, each in PARAMETERS.items():
        if not each.help:
            continue
        flags = ["--" + name.replace("_", "-"), *filter(None, [each.short])]
        number = isinstance(each.default, int | float) and each.kind is not bool
        help_text = f"{each.help} Default: {each.default:g}." if number else each.help
        option = typer.Option(*flags, metavar=each.metavar or None, help=help_text, show_default=False)
        if each.kind is bool:
            yield before, _parameter(name, bool, False, option)
        else:
            kind: Any = list[each.kind] if each.is_list else each.kind  # type: ignore[name-defined]
            yield before, _parameter(name, kind | None, None, option)
        before = name


def _setting_options() -> Iterator[tuple[str, inspect.Parameter]]:
    before = ""
    for name, each in OPTIONS.items():
        if each.help:
            kind, default = each.kind, each.default
            if each.is_list:
                kind, default = list[str] | None, None
            elif each.is_duration:
                kind = str | None
            yield each.after or before, _parameter(each.name, kind, default, option_for_setting(name))
            before = each.name


def _parse_setting(option: Option, value: Any) -> Any:
    if option.is_list:
        return tuple(value or ())
    if option.is_duration and value is not None:
        return duration(value, "--" + option.name.replace("_", "-"))
    return None if value == "" and types.NoneType in get_args(option.kind) else value
