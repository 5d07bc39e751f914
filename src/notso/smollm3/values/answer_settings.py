"""Sampling parameters and options of one answer, as keywords."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import date as Date
from typing import Any

from notso.smollm3.errors import InvalidRequestError, UnknownOptionError
from notso.smollm3.values.messages import Priority, Tool, WhenFull
from notso.smollm3.values.request_options import FixedPrefix, Grammar, QuoteSource, Replay, RequestOptions, ToolChoice
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams, SamplingSettings


class AnswerSettings(SamplingSettings, total=False):
    """The fields of SamplingParams and RequestOptions."""

    thinking: bool
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    strict_tools: Sequence[str]
    grammar: Grammar | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    prompt_only: bool
    embedding: bool
    is_plain: bool
    date: Date | None
    priority: Priority
    owner: str
    conversation: str | None
    continue_last: bool
    when_full: WhenFull
    adapter: str | None
    logits_processors: Sequence[str]
    prefix: FixedPrefix | None
    token_ids: bool
    replay: Replay | None
    sources: Sequence[QuoteSource]


_SAMPLING = frozenset(PARAMETERS)
_OPTIONS = frozenset(each.name for each in fields(RequestOptions))


def settings_of(
    params: SamplingParams | None, options: RequestOptions | None, settings: Mapping[str, Any]
) -> tuple[SamplingParams, RequestOptions]:
    """Return both with `settings` applied. Raises UnknownOptionError or InvalidRequestError naming the setting."""
    require_known(settings, _SAMPLING | _OPTIONS, "an answer")
    sampling = {name: value for name, value in settings.items() if name in _SAMPLING}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    asked = {name: value for name, value in settings.items() if name in _OPTIONS}
    for name in ("strict_tools", "logits_processors", "sources"):
        if isinstance(asked.get(name), list):
            asked[name] = tuple(asked[name])
    params, options = params or SamplingParams(), options or RequestOptions()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("params must be SamplingParams; further messages go into one list", param="params")
    if not isinstance(options, RequestOptions):
        raise InvalidRequestError("options must be RequestOptions", param="options")
    given = (*params.given, *sampling)
    return (replace(params, **sampling, given=given) if sampling else params), replace(options, **asked)


def require_known(settings: Iterable[str], known: Iterable[str], whose: str) -> None:
    """Raise UnknownOptionError for a name that is not in `known`."""
    names = sorted(known)
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UnknownOptionError(f"{whose} has no setting {name!r}{hint}", param=str(name))
