"""Options that several verbs share, declared once so that they are spelt, explained and checked alike."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from notso.regular_file import SECRET_BYTES
from notso.smollm3.values.engine_config import MAX_NUM_SEQS, MAX_THREADS, KVChoice, Placement


def _remember(variable: str, value: bool) -> bool:
    # A flag outlives its verb's frame (the error handler asks for it), so it becomes what its variable would have said.
    if value:
        os.environ[variable] = "1"
    return value


def _debug(value: bool) -> bool:
    return _remember("NOTSO_DEBUG", value)


def _plain(value: bool) -> bool:
    return _remember("NOTSO_PLAIN", value)


Debug = Annotated[bool, typer.Option("--debug", callback=_debug, help="Show the traceback of an error.")]
Plain = Annotated[bool, typer.Option("--plain", callback=_plain, help="No colour, no bars.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        envvar="NOTSO_MODEL",
        metavar="FILE",
        help="File, folder or `list` name (NOTSO_MODEL).",
        show_envvar=False,
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        envvar="NOTSO_CONTEXT",
        metavar="TOKENS",
        min=16,
        help="Context length. Default: 8192, or what fits.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        envvar="NOTSO_THREADS",
        metavar="N",
        min=1,
        max=MAX_THREADS,
        help="Threads that compute. Default: one per core.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="NOTSO_DEVICE",
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N (NOTSO_DEVICE).",
        show_envvar=False,
        show_default=False,
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FILE[:SCALE]",
        help="A LoRA adapter, repeatable.",
        show_default=False,
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="NAME[:ROLE]", help="Repeatable; ROLE: sign-in.", show_default=False),
]
Weights = Annotated[
    Placement,
    typer.Option(
        "--weights",
        envvar="NOTSO_WEIGHTS",
        help="auto: 2 MiB pages when idle (NOTSO_WEIGHTS).",
        show_envvar=False,
        show_default=False,
    ),
]
KV = Annotated[
    KVChoice,
    typer.Option(
        "--kv",
        envvar="NOTSO_KV",
        help="Bits of keys and values; auto: by file.",
        show_envvar=False,
        show_default=False,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        envvar="NOTSO_MAX_NUM_SEQS",
        metavar="N",
        min=1,
        max=MAX_NUM_SEQS,
        help="Answers at once. Default: 16, or what fits.",
        show_default=False,
    ),
]
CacheDisk = Annotated[
    float,
    typer.Option(
        "--cache-disk",
        envvar="NOTSO_CACHE_DISK",
        metavar="GB",
        min=0,
        max=1_000_000,
        help="GB kept of what was read (NOTSO_CACHE_DISK).",
        show_envvar=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="NOTSO_DATA_DIR",
        metavar="FOLDER",
        help="Holds the conversations (NOTSO_DATA_DIR).",
        show_envvar=False,
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        envvar="DATABASE_URL",
        metavar="URL",
        help="PostgreSQL instead of it (DATABASE_URL).",
        show_envvar=False,
        show_default=False,
    ),
]
EngineApi = Annotated[
    bool,
    typer.Option("--engine-api", help="Compute for front ends (NOTSO_ENGINE_KEY)."),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine-url",
        envvar="NOTSO_ENGINE_URL",
        metavar="URL",
        help="A front end: that server computes (NOTSO_ENGINE_URL).",
        show_envvar=False,
        show_default=False,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="NOTSO_API_KEY_FILE",
        metavar="FILE",
        help="Holds NOTSO_API_KEY (NOTSO_API_KEY_FILE).",
        show_envvar=False,
    ),
]


def duration(text: str, option: str) -> float:
    """Seconds. Raises BadParameter that names the option."""
    from notso.web.values.durations import duration_s

    seconds = duration_s(text)
    if seconds is None:
        raise typer.BadParameter("a time is seconds, or as 30s, 5m, 1h30m; -1 is for ever", param_hint=option)
    return seconds


Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="0..2", help="0 is greedy. Default: 0.6.", show_default=False),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="0..1", help="Nucleus. Default: 0.95.", show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="N",
        help="Longest answer, thinking included. Default: what fits.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same answer.", show_default=False)]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="Instructions for the model.", show_default=False)
]
NoThink = Annotated[bool, typer.Option("--no-think", help="Answer at once, without thinking.")]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Think, but do not show it.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.", show_default=False)]


class PluginChoice(NamedTuple):
    """Which plugins are on, and which of them says who asks."""

    names: tuple[str, ...]
    sign_in: str | None


def plugins(given: list[str] | None) -> PluginChoice:
    """What `--plugin` said. Raises typer.BadParameter for a role that is none, or taken twice."""
    sign_in = None
    names = []
    for each in given or ():
        name, _, role = each.partition(":")
        if role and (role != "sign-in" or sign_in is not None):
            raise typer.BadParameter(f"{each}: one plugin may have the role sign-in", param_hint="--plugin")
        sign_in = name if role else sign_in
        names.append(name)
    return PluginChoice(tuple(dict.fromkeys(names)), sign_in)


def api_key(file: Path | None) -> str | None:
    """The server's key, from `file` or else from NOTSO_API_KEY; None where neither names one.

    Raises typer.BadParameter for a file without a key in it: whoever names one does not want a server that has none.
    """
    if file is None:
        return os.environ.get("NOTSO_API_KEY") or None
    try:
        key = _read(file, SECRET_BYTES).decode().strip()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--api-key-file") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not text", param_hint="--api-key-file") from None
    if not key:
        raise typer.BadParameter(f"{file} is empty", param_hint="--api-key-file")
    return key


def engine_key() -> str:
    """What an engine and its front ends show each other, from NOTSO_ENGINE_KEY. Raises typer.BadParameter."""
    key = os.environ.get("NOTSO_ENGINE_KEY", "")
    if not key:
        raise typer.BadParameter("set NOTSO_ENGINE_KEY, the same for engine and front ends, 16 characters or more")
    return key


OF_THE_ENGINE = (
    *("model", "context", "kv", "threads", "device", "weights", "adapter", "adapter_dir", "max_num_seqs"),
    *("cache_disk", "engine_api", "keep_alive"),
)
"""Options of `serve` that say nothing where another server computes."""


def refuse_for_a_front_end(context: typer.Context) -> None:
    """Raises typer.BadParameter for the first of them that was given."""
    for name in OF_THE_ENGINE:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option} is the engine's: give it to the server that computes")


Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]


def require_free_place(out: Path, force: bool, name: str) -> None:
    """Raises typer.BadParameter where the file to write is there already, or its folder is not."""
    if out.exists() and not force:
        raise typer.BadParameter(f"{out} is there already; --force replaces it", param_hint=name)
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}; make it first", param_hint=name)


_MAX_TEXT_BYTES = 1 << 30


def _read(path: Path, most_bytes: int) -> bytes:
    """A file that a person named, which may be a pipe of their shell. Raises OSError, also for one without an end."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 10:,} KiB")
    return content


def read_text(path: Path, name: str) -> str:
    """A file that a person named, in UTF-8. Raises typer.BadParameter."""
    try:
        return _read(path, _MAX_TEXT_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not UTF-8 text (byte {error.start})", param_hint=name) from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=name) from None
