"""Exit codes and error messages: one table from exception to exit code and advice."""

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
    """Return an exit code and one line: what happened and how to fix it."""
    code, message, advice = _classify(error)
    line = " ".join(message.split()).rstrip(".")
    return code, f"{line}. {advice}" if advice else line


def details(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _classify(error: BaseException) -> tuple[int, str, str]:
    # Imported here because these packages may import numpy, which --help does not need.
    import notso.qtensor as qtensor
    from notso.smollm3 import errors as model

    if isinstance(error, model.InvalidRequestError) and not isinstance(error, model.ContextLengthError):
        return WRONG_USAGE, str(error), _option_hint(error.param)
    rows: tuple[tuple[type[BaseException], int, str], ...] = (
        (qtensor.KernelChoiceError, WRONG_USAGE, "Unset NOTSO_KERNELS and NOTSO_ATTENTION to let notso choose."),
        (qtensor.UnsupportedFormatError, BAD_MODEL, "Run `notso pull` to download a supported file."),
        (qtensor.DeviceMemoryError, NO_ROOM, "Run `nvidia-smi` to see what uses the GPU's memory."),
        (qtensor.DeviceError, FAILED, "Run `nvidia-smi` to check the GPU and its driver."),
        (qtensor.SafetensorsError, BAD_MODEL, "Download the folder again."),
        (qtensor.GGUFError, BAD_MODEL, "Check the file, or download the official one with `notso pull`."),
        (model.ModelFileError, BAD_MODEL, "`notso list` shows installed models; `notso pull` downloads one."),
        (model.TemplateError, BAD_MODEL, "`notso inspect FILE` shows the file's template."),
        (model.ContextLengthError, FAILED, "Shorten the prompt or increase --context."),
        (
            model.OutOfMemoryError,
            NO_ROOM,
            "Reduce --context, or avoid the GPU with --device cpu; `notso doctor` shows the memory limits.",
        ),
        (model.DownloadError, NETWORK, ""),
        *_plugin_rows(error),
        *_web_rows(error),
        (qtensor.NotsoError, FAILED, ""),
        (MemoryError, NO_ROOM, "Reduce --context or close other programs."),
        (KeyboardInterrupt, INTERRUPTED, ""),
    )
    for kind, code, advice in rows:
        if isinstance(error, kind):
            return code, str(error) or _plain_name(error), advice
    if isinstance(error, OSError):
        return _classify_os_error(error)
    if isinstance(error, RuntimeError) and "home directory" in str(
        error
    ):  # raised by pathlib for a user without a passwd entry
        return FAILED, "this user has no home directory", "Set HOME to a writable folder."
    message = f"unexpected error ({_plain_name(error)}: {error})"
    return FAILED, message, "Run the command again with --debug for details."


def _plugin_rows(error: BaseException) -> tuple[tuple[type[BaseException], int, str], ...]:
    # Compared by module name, so that plugins are imported only for their own errors.
    if not any(kind.__module__.startswith("notso.plugins") for kind in type(error).__mro__):
        return ()
    from notso.plugins.errors import PluginError

    return ((PluginError, WRONG_USAGE, "`notso plugin list` shows installed plugins."),)


def _web_rows(error: BaseException) -> tuple[tuple[type[BaseException], int, str], ...]:
    # Importing notso.web is slow.
    if not any(kind.__module__.startswith("notso.web") for kind in type(error).__mro__):
        return ()
    from notso.web.values import errors as web

    return (
        (web.UnsafeBindError, BIND_REFUSED, "Set NOTSO_API_KEY or --api-key-file."),
        (web.SettingsError, WRONG_USAGE, _settings_hint(getattr(error, "setting", ""))),
        (web.AddressInUseError, BIND_REFUSED, ""),
        (web.DataDirectoryBusyError, BAD_DATA_DIRECTORY, "Use another directory with --data-dir."),
        (web.DataDirectoryNewerError, BAD_DATA_DIRECTORY, "Use another directory with --data-dir."),
        (web.StorageFullError, NO_ROOM, "Free disk space, or use another directory with --data-dir."),
        (web.StorageError, FAILED, "Run `notso doctor` to check the data directory."),
    )


def _classify_os_error(error: OSError) -> tuple[int, str, str]:
    named = f"{error.filename}: " if error.filename else ""
    message = f"{named}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_ROOM, message, "Free disk space."
    if error.errno == errno.ENOMEM:
        return NO_ROOM, message, "Reduce --context or close other programs."
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return BIND_REFUSED, message, "Choose another --host or --port."
    return FAILED, message, ""


def _settings_hint(setting: str) -> str:
    return (
        "Run `notso keys list` to see the keys."
        if setting == "name"
        else "Run `notso serve --help` to see the settings."
    )


def _option_hint(param: str | None) -> str:
    return f"See --{param.replace('_', '-')} in the command's --help." if param in _OPTIONS else ""


_OPTIONS = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"})


def _plain_name(error: BaseException) -> str:
    return type(error).__name__


def debugging() -> bool:
    return os.environ.get("NOTSO_DEBUG", "").lower() in ("1", "true", "on", "yes")
