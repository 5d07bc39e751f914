"""Configuration file: TOML with a table per command, for example `[serve]` with `port = 8080`.

Precedence: command line, environment variable, configuration file, default.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import typer

from notso.cli import terminal
from notso.smollm3.values.engine_config import expand_home
from notso.system.files import file_type
from notso.text_file import NotTextError, read_text

MAX_BYTES = 1 << 20


def config_path() -> Path:
    path = os.environ.get("NOTSO_CONFIG")
    if path:
        return Path(expand_home(path))
    import platformdirs

    return platformdirs.user_config_path("notso") / "config.toml"


def read_config(group: Any) -> dict[str, dict[str, Any]]:
    """Return the file's values as click's default_map: command -> parameter -> value. Raises typer.BadParameter."""
    path = config_path()
    try:
        if not stat.S_ISREG(file_type(path)):
            if os.environ.get("NOTSO_CONFIG"):
                raise _error(path, "no such file")
            return {}
        import tomllib

        tables = tomllib.loads(read_text(path, MAX_BYTES))
    except NotTextError as error:
        raise _error(path, str(error)) from None
    except OSError as error:
        raise _error(path, error.strerror or "cannot be read") from None
    except (ValueError, RecursionError) as error:
        raise _error(path, terminal.on_one_line(str(error))) from None
    return {verb: _table(path, group, verb, values) for verb, values in tables.items()}


def _table(path: Path, group: Any, verb: str, values: Any) -> dict[str, Any]:
    command = group.commands.get(verb)
    if command is None or not isinstance(values, dict):
        commands = [name for name, each in group.commands.items() if not each.hidden]
        raise _error(path, f"[{terminal.on_one_line(verb)}] is not a command; commands: {', '.join(commands)}")
    options = {_option_name(each): each for each in command.params if each.param_type_name == "option"}
    for name, value in values.items():
        if name not in options:
            raise _error(
                path, f"[{verb}] has no option {terminal.on_one_line(name)}; options: {', '.join(sorted(options))}"
            )
        if isinstance(value, dict):
            raise _error(path, f"[{verb}] {name} is a table, not a value")
        if (expected := _expected(options[name], value)) is not None:
            raise _error(path, f"[{verb}] {name} must be {expected}")
    return {options[name].name: _expand_home(options[name], value) for name, value in values.items()}


def _expand_home(parameter: Any, value: Any) -> Any:
    # The shell expands `~` on the command line and in environment variables, but not in the configuration file.
    is_path = isinstance(value, str) and parameter.type_descriptor.annotation is Path
    return expand_home(value) if is_path else value


def _expected(parameter: Any, value: Any) -> str | None:
    # Without this check, typer would convert values of nearly any type: for example, `true` to port 1. Strings
    # are accepted, because typer parses them like arguments.
    if parameter.multiple or parameter.nargs != 1:
        matches = isinstance(value, list) and all(_expected_one(parameter, each) is None for each in value)
        return None if matches else "a list"
    return _expected_one(parameter, value)


def _expected_one(parameter: Any, value: Any) -> str | None:
    if isinstance(value, str):
        return None
    if parameter.is_flag:
        return None if isinstance(value, bool) else "true or false"
    kind = parameter.type_descriptor.annotation
    kind = get_args(kind)[0] if parameter.multiple and get_args(kind) else kind
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is int:
        return None if is_integer else "an integer"
    # Integers above the largest float cannot be converted to float.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return None if is_number else "a number" if kind is float else "a string"


def _option_name(parameter: Any) -> str:
    return str(next(each for each in parameter.opts if each.startswith("--"))).removeprefix("--")


def _error(path: Path, problem: str) -> typer.BadParameter:
    return typer.BadParameter(f"{path}: {problem}", param_hint="the configuration file")


def describe_config(context: typer.Context) -> list[str]:
    rows = [["option", "value", "source"]]
    sources: Mapping[str, str] = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    for each in context.command.params:
        if each.param_type_name == "option" and each.name in context.params and each.name != "show_config":
            source = context.get_parameter_source(each.name)
            value = context.params[each.name]
            text = "-" if value is None else terminal.on_one_line(_PASSWORD.sub(r"\1***", str(value)))
            rows.append([_option_name(each), text, sources.get(source.name if source else "", "default")])
    return [f"configuration file: {config_path()}", *terminal.columns(rows)]


# Matches the passwords in a database URL: scheme://user:password@host, and the parameters password and sslpassword.
_PASSWORD = re.compile(r"((?<=://)[^:/@]*:)[^/]*(?=@)|(?:(?<=[?&]password=)|(?<=[?&]sslpassword=))[^&]*")
