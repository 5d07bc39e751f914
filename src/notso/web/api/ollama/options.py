"""`options`, as Ollama spells them: what is sampled by, hints about a machine that is set up already, and the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from notso.smollm3 import MAX_STOP_STRINGS, SamplingParams
from notso.web.api.request_fields.field_reader import invalid
from notso.web.api.request_fields.fields import Fields, Notes, Text, hint, inert, works
from notso.web.api.request_fields.hints import Hint
from notso.web.api.request_fields.rarer_sampling import MIROSTAT_ADVICE
from notso.web.api.request_fields.sampling_fields import checked_params

RANDOM_SEED = -1
MAX_OPTION_TEXT = 256


def _whole(given: Any) -> Any:
    """Ollama takes 40.0 for 40."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


Whole = Annotated[int, BeforeValidator(_whole)]
Ignored = Annotated[bool | int | float | Annotated[str, Field(max_length=MAX_OPTION_TEXT)] | None, Hint()]


class OptionFields(Fields):
    """Ranges of the sampler's numbers are the engine's to check."""

    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    num_predict: Whole | None = None
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    # What changes the answer unless its value is this.
    tfs_z: float | None = None
    mirostat: Literal[0] | None = None
    penalize_newline: Literal[True] | None = None
    # What says how to use a machine.
    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    num_thread: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    vocab_only: Ignored = None
    embedding_only: Ignored = None
    numa: Ignored = None
    draft_num_predict: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None


_SET_UP = "the server is set up already"
_OFF = "leave this out; use top_p, top_k or min_p"

OPTION_NOTES: Notes = {
    "temperature": works("0 to 2; 0 takes the likeliest token; 0.6 if left out"),
    "top_k": works("0 or less is off"),
    "top_p": works("above 0, to 1; 0.95 if left out"),
    "min_p": works("0 to 1, relative to the likeliest token; 0 is off"),
    "seed": works("64 bits; -1 draws one"),
    "num_predict": works("longest answer, thinking included; what fits if 0 or less"),
    "stop": works(f"a text, or up to {MAX_STOP_STRINGS}, of up to 256 characters each; not part of the answer"),
    "repeat_penalty": works("1 is off"),
    "repeat_last_n": works("how far the penalties look back, 256 if left out; -1: over everything; 0: none of them"),
    "typical_p": works("above 0, to 1, where it is off"),
    "presence_penalty": works("-2 to 2"),
    "frequency_penalty": works("-2 to 2"),
    "tfs_z": inert("1: off", _OFF),
    "mirostat": inert("0: off", MIROSTAT_ADVICE),
    "penalize_newline": inert("true: a line's end is a token as any other", "leave this out"),
    "num_ctx": hint("the context is the server's (`--context`)"),
    "num_keep": hint("nothing of a prompt is left out"),
    "mirostat_tau": hint("mirostat is off"),
    "mirostat_eta": hint("mirostat is off"),
} | dict.fromkeys(
    (
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "f16_kv"),
        *("logits_all", "vocab_only", "embedding_only", "numa", "draft_num_predict"),
    ),
    hint(_SET_UP),
)
PARAMS = {  # the engine's -> Ollama's
    "max_tokens": "options.num_predict",
    "repeat_penalty": "options.repeat_penalty",
    "penalty_window": "options.repeat_last_n",
    **{
        name: f"options.{name}"
        for name in (
            *(
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "typical_p",
                "seed",
                "stop",
                "presence_penalty",
                "frequency_penalty",
            ),
        )
    },
}


def sampling_of(options: OptionFields, thinking_budget: int | None) -> SamplingParams:
    """The engine's parameters. Raises ApiError (400) that names the option."""
    if options.tfs_z not in (None, 1.0):
        raise invalid("options.tfs_z", f"this value of options.tfs_z is not supported: {_OFF}")
    penalties = {
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "penalty_window": _window(options.repeat_last_n),
    }
    chosen = {
        "max_tokens": options.num_predict if options.num_predict and options.num_predict > 0 else None,
        "thinking_budget": thinking_budget,
        "temperature": options.temperature,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "seed": None if options.seed == RANDOM_SEED else options.seed,
        "stop": (options.stop,) if isinstance(options.stop, str) else options.stop and tuple(options.stop),
        **({} if options.repeat_last_n == 0 else penalties),
    }
    return checked_params(PARAMS, **{name: value for name, value in chosen.items() if value is not None})


def _window(last: int | None) -> int | None:
    """Ours is 0 where Ollama's is -1: over everything."""
    return 0 if last == -1 else last
