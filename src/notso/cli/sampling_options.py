"""Options of `run` and `chat` for every sampling field, from the fields' own metadata."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams

SAMPLING = "sampling"


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each sampling field in place of its `**sampling`."""
    # Called when the command line is read: typer looks at the signature, and passes every value by name.
    plain = inspect.signature(command, eval_str=True).parameters.values()
    given = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in plain if each.name != SAMPLING]
    names = [each.name for each in given]
    at = names.index("hide_thinking") + 1
    command.__signature__ = inspect.Signature([*given[:at], *_options(), *given[at:]])  # type: ignore[attr-defined]
    return command


def params_from(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters; options that were not given have no say. Raises InvalidRequestError."""
    given = {name: _value(value) for name, value in sampling.items() if _is_given(value)}
    return SamplingParams(**given, given=tuple(given))


def _options() -> Iterator[inspect.Parameter]:
    for name, each in PARAMETERS.items():
        if not each.help:
            continue
        spelled = ["--" + name.replace("_", "-"), *filter(None, [each.short])]
        number = isinstance(each.default, int | float) and each.kind is not bool
        told = f"{each.help} Default: {each.default:g}." if number else each.help
        option = typer.Option(*spelled, metavar=each.metavar or None, help=told, show_default=False)
        kind: Any = bool if each.kind is bool else (list[each.kind] if each.is_list else each.kind) | None  # type: ignore[name-defined]
        default = False if each.kind is bool else None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )


def _is_given(value: Any) -> bool:
    # Not by truth: 0 is a value, which differs from a flag or list that was left out.
    return value is not None and value is not False and value != []


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
