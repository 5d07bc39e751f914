"""Options made from fields' metadata: sampling parameters for `run` and `chat`, settings for `serve`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args

import typer

from notso.cli import options
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams
from notso.web.values.settings import OPTIONS, Option, Settings


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each sampling parameter in place of its `**sampling`."""
    return _with_options(command, _sampling_options())


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting in place of its `**chosen`."""
    return _with_options(command, _setting_options())


def params_from(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters; options that were not given have no say. Raises InvalidRequestError."""
    given = {name: _value(value) for name, value in sampling.items() if _is_given(value)}
    return SamplingParams(**given, given=tuple(given))


def settings_from(chosen: Mapping[str, Any], **more: Any) -> Settings:
    """Return the settings of the options of `takes_settings`, and `more`. Raises SettingsError, typer.BadParameter."""
    return Settings(**more, **{name: _setting(each, chosen[each.name]) for name, each in OPTIONS.items() if each.help})


def _with_options(command: Callable[..., None], added: Iterable[tuple[str, inspect.Parameter]]) -> Callable[..., None]:
    # typer looks at the signature when the command line is read, and passes every value by name.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    given = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in parameters
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for after, option in added:
        given.insert([each.name for each in given].index(after) + 1, option)
    command.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _sampling_options() -> Iterator[tuple[str, inspect.Parameter]]:
    before = "hide_thinking"
    for name, each in PARAMETERS.items():
        if not each.help:
            continue
        spelled = ["--" + name.replace("_", "-"), *filter(None, [each.short])]
        number = isinstance(each.default, int | float) and each.kind is not bool
        told = f"{each.help} Default: {each.default:g}." if number else each.help
        option = typer.Option(*spelled, metavar=each.metavar or None, help=told, show_default=False)
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
            yield each.after or before, _parameter(each.name, kind, default, options.of_setting(name))
            before = each.name


def _setting(option: Option, value: Any) -> Any:
    if option.is_list:
        return tuple(value or ())
    if option.is_duration and value is not None:
        return options.duration(value, "--" + option.name.replace("_", "-"))
    return None if value == "" and types.NoneType in get_args(option.kind) else value


def _is_given(value: Any) -> bool:
    # Not by truth: 0 is a value, which differs from a flag or list that was left out.
    return value is not None and value is not False and value != []


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
