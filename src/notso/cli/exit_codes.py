"""What each failure says to a person and to a script: one table from error to exit code and next step."""

from __future__ import annotations

import errno
import os
import traceback

DONE = 0
FAILED = 1
WRONG_USAGE = 2
BAD_MODEL = 3
NO_ROOM = 4
BAD_DATA_DIRECTORY = 5
BIND_REFUSED = 6
NETWORK = 7
INTERRUPTED = 130


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code of an error and one line for stderr: what happened, and how to mend it."""
    code, message, advice = _classify(error)
    line = " ".join(message.split()).rstrip(".")
    return code, f"{line}. {advice}" if advice else line


def details(error: BaseException) -> str:
    """The traceback, for --debug."""
    return "".join(traceback.format_exception(error))


def _classify(error: BaseException) -> tuple[int, str, str]:
    # Imported here and not at the top: the floors may import numpy, and --help needs none of it.
    import notso.qtensor as qtensor
    from notso.smollm3 import errors as model

    if isinstance(error, model.InvalidRequestError) and not isinstance(error, model.ContextLengthError):
        return WRONG_USAGE, str(error), _option_hint(error.param)
    rows: tuple[tuple[type[BaseException], int, str], ...] = (
        (qtensor.KernelChoiceError, WRONG_USAGE, "Unset NOTSO_KERNELS and NOTSO_ATTENTION to let notso choose."),
        (qtensor.UnsupportedFormatError, BAD_MODEL, "`notso pull` fetches a file that works."),
        (qtensor.DeviceMemoryError, NO_ROOM, "`nvidia-smi` shows what fills the GPU's memory."),
        (qtensor.DeviceError, FAILED, "`nvidia-smi` shows whether the GPU and its driver work."),
        (qtensor.SafetensorsError, BAD_MODEL, "Fetch the folder again."),
        (qtensor.GGUFError, BAD_MODEL, "Check the file, or fetch the official one with `notso pull`."),
        (model.ModelFileError, BAD_MODEL, "`notso list` shows the models on this machine, `notso pull` fetches one."),
        (model.TemplateError, BAD_MODEL, "`notso inspect FILE` shows the file's template."),
        (model.ContextLengthError, FAILED, "Shorten the prompt, or make the context larger with --context."),
        (
            model.OutOfMemoryError,
            NO_ROOM,
            "--context sets it, --device cpu leaves a GPU out; `notso doctor` shows what bounds it.",
        ),
        (model.DownloadError, NETWORK, ""),
        *_plugin_rows(error),
        *_web_rows(error),
        (qtensor.NotsoError, FAILED, ""),
        (MemoryError, NO_ROOM, "Make the context smaller with --context, or close other programs."),
        (KeyboardInterrupt, INTERRUPTED, ""),
    )
    for kind, code, advice in rows:
        if isinstance(error, kind):
            return code, str(error) or _plain_name(error), advice
    if isinstance(error, OSError):
        return _classify_os_error(error)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of pathlib, for a user nobody knows
        return FAILED, "this user has no home directory", "Set HOME to a folder that can be written."
    message = f"something unexpected went wrong ({_plain_name(error)}: {error})"
    return FAILED, message, "Run it again with --debug for the details."


def _plugin_rows(error: BaseException) -> tuple[tuple[type[BaseException], int, str], ...]:
    """That of plugins, likewise."""
    if not any(kind.__module__.startswith("notso.plugins") for kind in type(error).__mro__):
        return ()
    from notso.plugins.errors import PluginError

    return ((PluginError, WRONG_USAGE, "`notso plugin list` shows what is installed."),)


def _web_rows(error: BaseException) -> tuple[tuple[type[BaseException], int, str], ...]:
    """The web floor's rows, only where one of its errors is at hand: importing that floor is not free."""
    if not any(kind.__module__.startswith("notso.web") for kind in type(error).__mro__):
        return ()
    from notso.web.values import errors as web

    return (
        (web.UnsafeBindError, BIND_REFUSED, "NOTSO_API_KEY or --api-key-file sets the key."),
        (web.SettingsError, WRONG_USAGE, _settings_hint(getattr(error, "setting", ""))),
        (web.AddressInUseError, BIND_REFUSED, ""),
        (web.DataDirectoryBusyError, BAD_DATA_DIRECTORY, "--data-dir names another."),
        (web.DataDirectoryNewerError, BAD_DATA_DIRECTORY, "--data-dir names another."),
        (web.StorageFullError, NO_ROOM, "--data-dir names another place."),
        (web.StorageError, FAILED, "`notso doctor` shows the data directory."),
    )


def _classify_os_error(error: OSError) -> tuple[int, str, str]:
    named = f"{error.filename}: " if error.filename else ""
    message = f"{named}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_ROOM, message, "Make room on the disk."
    if error.errno == errno.ENOMEM:
        return NO_ROOM, message, "Make the context smaller with --context, or close other programs."
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return BIND_REFUSED, message, "Choose another address with --host or another port with --port."
    return FAILED, message, ""


def _settings_hint(setting: str) -> str:
    return "`notso keys list` shows the keys." if setting == "name" else "`notso serve --help` lists the settings."


def _option_hint(param: str | None) -> str:
    return f"See --{param.replace('_', '-')} in the command's --help." if param in _OPTIONS else ""


_OPTIONS = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"})


def _plain_name(error: BaseException) -> str:
    return type(error).__name__


def debugging() -> bool:
    """Whether tracebacks were asked for, by --debug or NOTSO_DEBUG."""
    return os.environ.get("NOTSO_DEBUG", "").lower() in ("1", "true", "on", "yes")
