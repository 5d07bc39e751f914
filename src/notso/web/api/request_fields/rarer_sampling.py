"""The rarer fields that say how tokens are chosen and when an answer may end, as llama.cpp and vLLM spell them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from notso.smollm3 import MAX_BREAKERS, MAX_STOP_TOKENS
from notso.web.api.request_fields.fields import Fields, Notes, Text, inert, works

MIROSTAT_ADVICE = (
    "it steers by how surprising the tokens before were, so a token would depend on more than seed, text and place, "
    "which an answer here never does; use min_p, typical_p or top_p"
)


def _as_list(given: Any) -> Any:
    """text-generation-webui and its clients send the list as JSON text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given if given.lstrip().startswith("[") else f"[{given}]")
    except (ValueError, RecursionError):
        raise ValueError("it should be a list of texts") from None


class RarerSamplingFields(Fields):
    """Ranges of the sampler's numbers are the engine's to check."""

    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: (
        Annotated[list[Text], Field(max_length=MAX_BREAKERS, fail_fast=True), BeforeValidator(_as_list)] | None
    ) = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    mirostat: Literal[0] | None = None


RARER_NOTES: Notes = {
    "typical_p": works("above 0, to 1, where it is off; behind `top_k`, before `top_p`"),
    "xtc_probability": works(
        "0 to 1, 0 is off: how often all but the last of the choices of `xtc_threshold` or more are taken away, "
        "behind the other filters"
    ),
    "xtc_threshold": works("0 to 1; 0.1 if left out; above 0.5 nothing is taken away"),
    "dry_multiplier": works("0 to 100, 0 is off: a token that prolongs a repetition is penalised, as in llama.cpp"),
    "dry_base": works("1 to 100; 1.75 if left out"),
    "dry_allowed_length": works("repetitions up to this length are free; 2 if left out"),
    "dry_penalty_last_n": works("tokens in which repetitions are looked for; -1, all, if left out; 0 is off"),
    "dry_sequence_breakers": works(
        f"up to {MAX_BREAKERS} texts that no repetition goes across; a line's end, `:`, `\"` and `*` if left out"
    ),
    "min_tokens": works(
        "fewest tokens, thinking included, before the model's end or a stop token may come; not with a grammar"
    ),
    "ignore_eos": works("true: the model's end never comes, as in llama.cpp; not with a grammar"),
    "stop_token_ids": works(f"up to {MAX_STOP_TOKENS} token ids that end the answer and are not part of it"),
    "repeat_last_n": works("how far the penalties look back, 256 if left out; -1: over everything; 0: none of them"),
    "mirostat": inert("0: off", MIROSTAT_ADVICE),
}

_SAME = tuple(name for name in RARER_NOTES if name not in ("repeat_last_n", "mirostat"))
NAMES = {"penalty_window": "repeat_last_n"}
"""The engine's -> ours."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def with_rarer(fields: RarerSamplingFields, chosen: dict[str, Any]) -> dict[str, Any]:
    """What was chosen otherwise, and these. A penalty that looks at no token is none."""
    rarer = {name: getattr(fields, name) for name in _SAME}
    for name in ("dry_sequence_breakers", "stop_token_ids"):
        rarer[name] = None if rarer[name] is None else tuple(rarer[name])
    if fields.repeat_last_n == 0:
        return chosen | rarer | dict.fromkeys(_PENALTIES)
    return chosen | rarer | {"penalty_window": 0 if fields.repeat_last_n == -1 else fields.repeat_last_n}
