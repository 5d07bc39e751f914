"""Map exceptions to exit codes, and to error messages with advice."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DONE = 0
FAILED = 1
WRONG_USAGE = 2
BAD_MODEL = 3
NO_ROOM = 4
BAD_DATA_DIRECTORY = 5
BIND_REFUSED = 6
NETWORK = 7
CUT = 8
REQUESTS_FAILED = 9
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # the exit code that shells report for a process killed by SIGPIPE


@dataclass(frozen=True, slots=True)
class Command:
    """The command that failed. Advice must not name options that the command lacks."""

    verb: str = ""
    options: frozenset[str] | None = None  # parameter names; None: advice may name any option

    def has(self, option: str) -> bool:
        return self.options is None or option in self.options

    @property
    def help(self) -> str:
        return f"`notso {self.verb} --help`" if self.verb else "the command's --help"


ANY_COMMAND = Command()
Advice = str | Callable[[Command], str]


def explain(error: BaseException, command: Command = ANY_COMMAND) -> tuple[int, str]:
    """Return an exit code, and one line that says what happened and how to fix it."""
    code, message, advice = _classify(error, command)
    line = " ".join(_add_file_path(error, message).split()).rstrip(".")
    hint = advice if isinstance(advice, str) else advice(command)
    return code, f"{line}. {hint}" if hint else line


def _add_file_path(error: BaseException, message: str) -> str:
    from notso.qtensor import NotsoError, one_line

    path = error.path if isinstance(error, NotsoError) else None
    if path is None or path in message:
        return message
    # If the message begins with the file name, replace the name with the full path.
    return f"{one_line(path)}: {message.removeprefix(f'{Path(path).name}: ')}"


def format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _classify(error: BaseException, command: Command) -> tuple[int, str, Advice]:
    # Imported only here, because these packages may import numpy, which would slow down --help.
    import notso.qtensor as qtensor
    from notso.smollm3 import errors as model
    from notso.system.memory import is_memory_shortage

    if isinstance(error, model.InvalidRequestError) and not isinstance(error, model.ContextLengthError):
        return WRONG_USAGE, str(error), _option_advice(error.param, command)
    rows: tuple[tuple[type[BaseException], int, Advice], ...] = (
        (qtensor.KernelChoiceError, WRONG_USAGE, "Unset NOTSO_KERNELS and NOTSO_ATTENTION to let notso choose."),
        (qtensor.UnsupportedFormatError, BAD_MODEL, _file_advice),
        (qtensor.DeviceMemoryError, NO_ROOM, _gpu_memory_advice),
        (qtensor.DeviceError, FAILED, "Run `nvidia-smi` to check the GPU and its driver."),
        (qtensor.SafetensorsError, BAD_MODEL, "Download the folder again."),
        (qtensor.GGUFError, BAD_MODEL, _file_advice),
        (model.AdapterFileError, BAD_MODEL, _if_option("adapter", "Check --adapter.", "Check the adapter.")),
        (model.ModelFileError, BAD_MODEL, _model_advice),
        (model.TemplateError, BAD_MODEL, _template_advice),
        (model.ContextLengthError, FAILED, _context_advice),
        (model.OutOfMemoryError, NO_ROOM, _memory_advice),
        (model.NoSpaceError, NO_ROOM, "Free disk space, or set HF_HOME to a folder on a larger disk."),
        (model.DownloadError, NETWORK, ""),
        *_rows_of_package(error),
        (qtensor.NotsoError, FAILED, ""),
        (KeyboardInterrupt, INTERRUPTED, ""),
    )
    if is_memory_shortage(error) and not isinstance(error, OSError):
        memory, reason = qtensor.available_memory(), ": ".join(filter(None, (type(error).__name__, str(error))))
        message = f"probably out of memory: {memory.source} leaves {memory.available_bytes >> 20:,} MiB ({reason})"
        return NO_ROOM, message, _close_programs_advice
    for kind, code, advice in rows:
        if isinstance(error, kind):
            return code, str(error) or type(error).__name__, advice
    if isinstance(error, OSError):
        return _classify_os_error(error)
    message = f"unexpected error ({type(error).__name__}: {error})"
    return FAILED, message, "" if debugging() else "Run the command again with --debug for details."


_WRITING_COMMANDS = ("convert", "quantize", "quantise", "synth", "tune")
_READING_COMMANDS = ("inspect", "verify", *_WRITING_COMMANDS)


def _file_advice(command: Command) -> str:
    if command.verb in _READING_COMMANDS:  # the official file cannot replace the one to be inspected or converted
        return "Check the file: it must be a complete GGUF file of a supported type."
    return "Check the file, or download the official one with `notso pull`."


def _if_option(option: str, advice: str, otherwise: str = "") -> Advice:
    return lambda command: advice if command.has(option) else otherwise


def _model_advice(command: Command) -> str:
    if command.verb in _WRITING_COMMANDS:
        return ""  # the message already names the setting or tensor
    if command.verb in _READING_COMMANDS:
        return "`notso list` shows installed models."
    return "`notso list` shows installed models; `notso pull` downloads one."


def _template_advice(command: Command) -> str:
    inspection = "" if command.verb == "inspect" else "`notso inspect FILE` shows the file's template"
    replacement = "--chat-template-file replaces it" if command.has("chat_template_file") else ""
    advice = "; ".join(part for part in (inspection, replacement) if part)
    return f"{advice[0].upper()}{advice[1:]}." if advice else ""


def _context_advice(command: Command) -> str:
    if command.verb == "chat":
        return "Shorten the message, free the context with /clear, or start the chat with a larger --context."
    return "Shorten the prompt or increase --context." if command.has("context") else "Shorten the text."


def _gpu_memory_advice(command: Command) -> str:
    cpu = ", or avoid the GPU with --device cpu" if command.has("device") else ""
    return f"Run `nvidia-smi` to see what uses the GPU's memory{cpu}."


def _memory_advice(command: Command) -> str:
    size = next((f"--{name}" for name in ("context", "window") if command.has(name)), "")
    suggestions = [f"reduce {size}"] if size else ["close other programs"]
    suggestions += ["avoid the GPU with --device cpu"] if command.has("device") else []
    joined = ", or ".join(suggestions)
    limits = "" if command.verb == "doctor" else "; `notso doctor` shows the memory limits"
    return f"{joined[0].upper()}{joined[1:]}{limits}."


_close_programs_advice = _if_option("context", "Reduce --context or close other programs.", "Close other programs.")


def _address_advice(command: Command) -> str:
    options = [f"--{name}" for name in ("host", "port") if command.has(name)]
    return f"Choose another {' or '.join(options)}." if options else ""


def _plugin_advice(command: Command) -> str:
    # A list of plugins would not help if `notso plugin new` fails.
    return "" if command.verb == "plugin" else "`notso plugin list` shows installed plugins."


def _rows_of_package(error: BaseException) -> tuple[tuple[type[BaseException], int, Advice], ...]:
    # The package's name is checked first: notso.web is slow to import, so it is imported only for its own errors.
    packages = {".".join(kind.__module__.split(".")[:2]) for kind in type(error).__mro__}
    if "notso.plugins" in packages:
        from notso.plugins.errors import PluginError

        return ((PluginError, WRONG_USAGE, _plugin_advice),)
    if "notso.web" not in packages:
        return ()
    from notso.web.values import errors as web

    other_directory = _if_option("data_dir", "Use another directory with --data-dir.")
    set_key = _if_option("api_key_file", "Set NOTSO_API_KEY or --api-key-file.", "Set NOTSO_API_KEY.")
    return (
        (web.UnsafeBindError, BIND_REFUSED, set_key),
        (web.SettingsError, WRONG_USAGE, _settings_advice(getattr(error, "setting", ""))),
        (web.AddressInUseError, BIND_REFUSED, ""),
        (web.DataDirectoryBusyError, BAD_DATA_DIRECTORY, ""),
        (web.DataDirectoryNewerError, BAD_DATA_DIRECTORY, other_directory),
        (web.StorageFullError, NO_ROOM, _disk_space_advice),
        (web.StorageError, FAILED, _doctor_advice),
    )


def _disk_space_advice(command: Command) -> str:
    other = ", or use another directory with --data-dir" if command.has("data_dir") else ""
    return f"Free disk space{other}."


def _doctor_advice(command: Command) -> str:
    return "" if command.verb == "doctor" else "Run `notso doctor` to check the data directory and the database."


def _classify_os_error(error: OSError) -> tuple[int, str, Advice]:
    prefix = f"{error.filename}: " if error.filename else ""
    message = f"{prefix}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_ROOM, message, "Free disk space."
    if error.errno == errno.ENOMEM:
        return NO_ROOM, message, _close_programs_advice
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return BIND_REFUSED, message, _address_advice
    return FAILED, message, ""


def _settings_advice(setting: str) -> Advice:
    if setting == "name":
        return "Run `notso keys list` to see the keys."
    return lambda command: f"See {command.help} for the settings."


def _option_advice(param: str | None, command: Command) -> str:
    has_option = param is not None and (param in _SAMPLING if command.options is None else param in command.options)
    return f"See --{param.replace('_', '-')} in {command.help}." if param is not None and has_option else ""


_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"})


def debugging() -> bool:
    return os.environ.get("NOTSO_DEBUG", "").lower() in ("1", "true", "on", "yes")
