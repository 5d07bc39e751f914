"""Samplers that there are not, as clients of other servers spell them: taken where they are off, refused where not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from notso.web.api.request_fields.fields import Fields, Notes, hint, inert
from notso.web.api.request_fields.hints import Hint


def whole(given: Any) -> Any:
    """1.0 is 1, and true is not."""
    if isinstance(given, bool):
        raise ValueError("it should be a number")
    return int(given) if isinstance(given, float) and given.is_integer() else given


Off = Annotated[Literal[0, -1], BeforeValidator(whole)]
OffBelow0 = Annotated[Literal[-1], BeforeValidator(whole)]
Off0 = Annotated[Literal[0], BeforeValidator(whole)]
Off1 = Annotated[Literal[1], BeforeValidator(whole)]
Whole = Annotated[int, BeforeValidator(whole)]
Number = int | float


class AbsentSamplerFields(Fields):
    """Each with the one value that is off."""

    tfs_z: Off1 | None = None
    top_a: Off0 | None = None
    dynatemp_range: Off0 | None = None
    dynatemp_exponent: Annotated[Number | None, Hint(done=(1,))] = None
    mirostat_tau: Annotated[Number | None, Hint()] = None
    mirostat_eta: Annotated[Number | None, Hint()] = None
    smoothing_factor: Off0 | None = None
    guidance_scale: Off1 | None = None
    length_penalty: Off1 | None = None
    no_repeat_ngram_size: Off0 | None = None
    top_n_sigma: Off | None = None
    adaptive_target: OffBelow0 | None = None
    adaptive_decay: Annotated[Number | None, Hint()] = None
    min_keep: Off0 | None = None
    n_indent: Off0 | None = None
    t_max_predict_ms: Off | None = None
    id_slot: Annotated[int | None, Hint(done=(-1,))] = None
    n_keep: Annotated[int | None, Hint(done=(0,))] = None
    n_discard: Annotated[int | None, Hint(done=(0,))] = None
    n_cache_reuse: Annotated[int | None, Hint(done=(0,))] = None
    sse_ping_interval: Annotated[Number | None, Hint()] = None
    backend_sampling: Annotated[bool | None, Hint(done=(False,))] = None
    samplers: Annotated[Any, Hint()] = None
    sampler_order: Annotated[Any, Hint()] = None
    sampler_priority: Annotated[Any, Hint()] = None
    temperature_last: Annotated[bool | None, Hint(done=(False,))] = None
    smoothing_curve: Annotated[Number | None, Hint()] = None
    skew: Off0 | None = None
    typical: Off1 | None = None
    epsilon_cutoff: Off0 | None = None
    eta_cutoff: Off0 | None = None
    penalty_alpha: Off0 | None = None
    encoder_repetition_penalty: Off1 | None = None
    num_beams: Off1 | None = None
    use_beam_search: Literal[False] | None = None
    early_stopping: Annotated[bool | None, Hint(done=(False,))] = None
    best_of: Off1 | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Annotated[bool | None, Hint(done=(True,))] = None
    include_stop_str_in_output: Literal[False] | None = None
    add_bos_token: Annotated[bool | None, Hint()] = None
    ban_eos_token: Literal[False] | None = None
    truncation_length: Annotated[int | None, Hint()] = None
    truncate_prompt_tokens: Annotated[int | None, Hint()] = None


_ORDER = "the order is penalties, temperature, top_k, typical_p, top_p, min_p, xtc"

ABSENT_NOTES: Notes = {
    "tfs_z": inert("1: off", "use top_p, top_k or min_p"),
    "top_a": inert("0: off", "use min_p"),
    "dynatemp_range": inert("0: off", "use temperature"),
    "dynatemp_exponent": hint("the range is 0", "1"),
    "mirostat_tau": hint("mirostat is off"),
    "mirostat_eta": hint("mirostat is off"),
    "smoothing_factor": inert("0: off", "use temperature or min_p"),
    "guidance_scale": inert("1: off", "say it in the messages"),
    "length_penalty": inert("1: off", "use max_tokens"),
    "no_repeat_ngram_size": inert("0: off", "use repeat_penalty or dry_multiplier"),
    "top_n_sigma": inert("0 or -1: off", "use top_k, top_p or min_p"),
    "adaptive_target": inert("-1: off", "use temperature, top_p or min_p"),
    "adaptive_decay": hint("the sampler it belongs to is off"),
    "min_keep": inert("0: off", "leave it out"),
    "n_indent": inert("0: off", "leave it out"),
    "t_max_predict_ms": inert("0 or -1: off", "an answer does not depend on the machine's speed; use max_tokens"),
    "id_slot": hint("what is known of a prompt is found wherever it was computed", "-1"),
    "n_keep": hint("nothing of a prompt is thrown away", "0"),
    "n_discard": hint("nothing of a prompt is thrown away", "0"),
    "n_cache_reuse": hint("what is known of a prompt is found by itself", "0"),
    "sse_ping_interval": hint("a comment comes every 15 s"),
    "backend_sampling": hint("there is one sampler", "false"),
    "samplers": hint(_ORDER),
    "sampler_order": hint(_ORDER),
    "sampler_priority": hint(_ORDER),
    "temperature_last": hint(_ORDER, "false"),
    "smoothing_curve": hint("the sampler it belongs to is off"),
    "skew": inert("0: off", "use top_p or min_p"),
    "typical": inert("1: off", "use typical_p"),
    "epsilon_cutoff": inert("0: off", "use min_p"),
    "eta_cutoff": inert("0: off", "use min_p"),
    "penalty_alpha": inert("0: off", "use temperature, top_p or min_p"),
    "encoder_repetition_penalty": inert("1: off", "use repeat_penalty"),
    "num_beams": inert("1: off", "there is no beam search; use n"),
    "use_beam_search": inert("false", "there is no beam search; use n"),
    "early_stopping": hint("there is no beam search", "false"),
    "best_of": inert("1", "use n"),
    "skip_special_tokens": inert("true", "an answer never shows control tokens"),
    "spaces_between_special_tokens": hint("an answer never shows control tokens", "true"),
    "include_stop_str_in_output": inert("false", "the event or field `stop` tells which stop string came"),
    "add_bos_token": hint("the model has no token that begins a text"),
    "ban_eos_token": inert("false", "use ignore_eos"),
    "truncation_length": hint("the context is the server's (`--context`)"),
    "truncate_prompt_tokens": hint("a prompt that is too long is refused"),
}
