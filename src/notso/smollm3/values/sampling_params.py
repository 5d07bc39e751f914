"""Define and validate sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from notso.smollm3.errors import InvalidRequestError, iterate, require

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 64
MAX_BREAKERS = 32
MAX_BREAKER_CHARACTERS = 40
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's defaults for DRY
MAX_CONTEXT = 131_072  # longest context of the model

Api = Literal["openai", "responses", "anthropic", "ollama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPage:
    """A parameter's field on the settings page, with its English label and hint."""

    label: str
    hint: str
    unset: str = ""  # text shown in an empty field if there is no default value
    place: int = 99  # position in the form
    low: float | None = None  # `low` and `high` narrow the engine's range
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Metadata of a sampling parameter for the command line, APIs, docs and settings page.

    openai, responses, anthropic, ollama: the API's names for the parameter, with their documentation. None: the field's
        name. Empty: not supported, or handled separately.
    """

    help: str = ""  # help text of the command-line option; empty: there is no option
    metavar: str = ""  # placeholder in the help; by default derived from kind and range
    short: str = ""
    low: float = 0
    high: float = 1 << 31
    above: bool = False  # `low` itself is not allowed
    most: int = 0  # maximum number of items of a list
    characters: int = 0  # maximum length of an item
    text: str = ""  # documentation of the field in the APIs; default: `help`
    openai: Mapping[str, str] | None = None  # /v1/chat/completions, /v1/completions and llama.cpp's /completion
    responses: Mapping[str, str] | None = None
    anthropic: Mapping[str, str] | None = None
    ollama: Mapping[str, str] | None = None
    gguf: str = ""  # key in a model file, below general.sampling
    page: OnPage | None = None
    # The following values are derived from the field of SamplingParams.
    name: str = ""
    default: Any = None
    kind: type = object  # for a list, the type of its items
    is_list: bool = False

    def names(self, api: Api) -> Mapping[str, str]:
        spelled: Mapping[str, str] | None = getattr(self, api)
        return {self.name: self.text or self.help} if spelled is None else spelled


def _parameter(default: Any, **facts: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(**facts)})


_NONE: Mapping[str, str] = {}
_OPENAI_ONLY: Mapping[str, Any] = {"responses": _NONE, "anthropic": _NONE, "ollama": _NONE}
# In the APIs, as in llama.cpp, 0 means no tokens. In `penalty_window`, 0 means all tokens.
_WINDOW = {"repeat_last_n": "number of recent tokens that the penalties consider; default 256; -1: all; 0: none"}
_AMONG_RECENT = "among the last `repeat_last_n` tokens"
_REPETITION = {"repeat_penalty": f"penalty on tokens that occur {_AMONG_RECENT}, 0.01 to 10; 1 is off"}
_REPETITION_NAMES = {**_REPETITION, "repetition_penalty": "alias of `repeat_penalty`"}
_SEED = {"seed": "64-bit integer; the same seed and input give the same text; -1: random"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. The defaults are SmolLM3's settings (temperature 0.6, top_p 0.95).

    PARAMETERS has each field's range and meaning. None means no limit or, for seed, a random value. The same seed and
    input give the same text. Penalties consider the last `penalty_window` tokens of prompt and answer (0: all). If a
    token would extend a repetition of at least `dry_allowed_length` tokens, DRY lowers its logit by
    dry_multiplier * dry_base ** (length - dry_allowed_length).

    given: fields that were set explicitly, possibly to their default. Other fields with their default take the model
        file's value, if any (see `with_defaults`).

    Raises InvalidRequestError with the field as `param`.
    """

    max_tokens: int | None = _parameter(
        None,
        help="Maximum tokens to generate, including thinking. Default: limited only by the context.",
        short="-n",
        low=1,
        openai=_NONE,  # handled separately, because the name differs between OpenAI's APIs
        responses={
            "max_output_tokens": "maximum tokens, including reasoning; if it is omitted or larger than the remaining "
            "context, as many as fit"
        },
        anthropic=_NONE,  # handled separately, because it is required
        ollama={"num_predict": "maximum tokens, including reasoning; 0 or less: as many as fit in the context"},
        page=OnPage(
            label="Max tokens",
            hint="Maximum length of a response. One token is about ¾ of a word.",
            unset="Unlimited",
            place=4,
            high=MAX_CONTEXT,
        ),
    )
    thinking_budget: int | None = _parameter(
        None,
        help="Maximum thinking tokens, after which the answer begins. Default: unlimited.",
        openai=_NONE,  # handled separately, because each API specifies it differently
        responses=_NONE,
        anthropic=_NONE,
        ollama=_NONE,
        page=OnPage(
            label="Max thinking tokens",
            hint="The answer starts when this many tokens are used.",
            unset="Unlimited",
            place=6,
            high=MAX_CONTEXT,
        ),
    )
    temperature: float = _parameter(
        0.6,
        help="Temperature; 0 is greedy.",
        short="-t",
        high=2,
        text="0 to 2; 0 is greedy; default 0.6",
        gguf="temp",
        page=OnPage(label="Temperature", hint="0 is deterministic; higher values are more varied.", place=1),
    )
    top_p: float = _parameter(
        0.95,
        help="Nucleus sampling (top-p).",
        high=1,
        above=True,
        text="0 to 1; 0 is greedy; default 0.95",
        gguf="top_p",
        page=OnPage(
            label="Top P", hint="Sample only from the most likely tokens whose probabilities add up to this.", place=2
        ),
    )
    top_k: int = _parameter(
        0,
        help="Sample only from the N most likely tokens; 0 is off.",
        text="number of most likely tokens to choose from; 0 or -1: all",
        ollama={"top_k": "number of most likely tokens to choose from; 0 or less: all"},
        gguf="top_k",
    )
    min_p: float = _parameter(
        0.0,
        help="Ignore tokens less likely than this fraction of the most likely one.",
        high=1,
        text="minimum probability relative to that of the most likely token, 0 to 1; 0 is off",
        gguf="min_p",
        page=OnPage(
            label="Min P", hint="Ignore tokens less likely than this fraction of the most likely one.", place=3
        ),
    )
    repetition_penalty: float = _parameter(
        1.0,
        help="Penalty on repeated tokens; 1 is off.",
        metavar="NUMBER",
        low=0.01,
        high=10,
        openai=_REPETITION_NAMES,
        responses=_REPETITION_NAMES,
        anthropic=_REPETITION_NAMES,
        ollama=_REPETITION,
        gguf="penalty_repeat",
    )
    presence_penalty: float = _parameter(
        0.0,
        help="Penalty on tokens that have already occurred.",
        low=-2,
        high=2,
        text=f"penalty on tokens that occur {_AMONG_RECENT}, -2 to 2",
    )
    frequency_penalty: float = _parameter(
        0.0,
        help="Penalty on tokens in proportion to how often they have occurred.",
        low=-2,
        high=2,
        text=f"penalty in proportion to how often a token occurs {_AMONG_RECENT}, -2 to 2",
    )
    penalty_window: int = _parameter(
        256,
        help="Number of recent tokens that the penalties consider; 0: all (-1 in the APIs).",
        openai=_WINDOW,
        responses=_WINDOW,
        anthropic=_WINDOW,
        ollama=_WINDOW,
        gguf="penalty_last_n",
    )
    seed: int | None = _parameter(
        None,
        help="Random seed; the same seed gives the same answer.",
        low=-(1 << 63),
        high=(1 << 64) - 1,
        openai={**_SEED, "random_seed": "Mistral's name for `seed`"},
        responses=_SEED,
        anthropic=_SEED,
        ollama=_SEED,
        page=OnPage(
            label="Seed",
            hint="The same seed, settings and messages give the same response.",
            unset="Random",
            place=5,
            high=(1 << 63) - 1,
        ),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata={
            "parameter": Parameter(
                low=-100,
                high=100,
                most=MAX_LOGIT_BIAS,
                text="an object that maps up to 1,024 token ids to values from -100 to 100, which are added to the "
                "logits",
                **_OPENAI_ONLY,
            )
        },
    )
    stop: tuple[str, ...] = _parameter(
        (),
        help="Stop when this text is generated; repeatable (at most 64).",
        most=MAX_STOP_STRINGS,
        characters=MAX_STOP_CHARACTERS,
        text=f"a string or a list of up to {MAX_STOP_STRINGS} strings, each of up to 256 characters; not included in "
        "the response",
        anthropic={
            "stop_sequences": f"up to {MAX_STOP_STRINGS} strings of up to 256 characters each; not included in the "
            "answer, but reported in `stop_sequence`"
        },
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (),
        help="Stop when the token with this id is generated; repeatable (at most 64).",
        most=MAX_STOP_TOKENS,
        text=f"up to {MAX_STOP_TOKENS} token ids that end the response; not included in it",
        **_OPENAI_ONLY,
    )
    min_tokens: int = _parameter(
        0,
        help="Minimum number of tokens before the answer may end.",
        text="minimum number of tokens, including reasoning; cannot be combined with a grammar",
        **_OPENAI_ONLY,
    )
    ignore_eos: bool = _parameter(
        False,
        help="Continue where the model would end its answer.",
        text="true: continue where the model would end the response, as in llama.cpp; cannot be combined with a "
        "grammar",
        **_OPENAI_ONLY,
    )
    typical_p: float = _parameter(
        1.0,
        help="Locally typical sampling; 1 is off.",
        high=1,
        above=True,
        text="locally typical sampling: more than 0, at most 1; 1 is off; applied after `top_k` and before `top_p`",
    )
    xtc_probability: float = _parameter(
        0.0,
        help="Probability of removing all but the least likely of the tokens above the XTC threshold.",
        high=1,
        text="probability, after the other filters, of removing all but the least likely of the tokens above "
        "`xtc_threshold`; 0 to 1; 0 is off",
        gguf="xtc_probability",
        **_OPENAI_ONLY,
    )
    xtc_threshold: float = _parameter(
        0.1,
        help="Probability above which XTC may remove a token.",
        high=1,
        text="0 to 1; default 0.1; above 0.5, XTC removes nothing",
        gguf="xtc_threshold",
        **_OPENAI_ONLY,
    )
    dry_multiplier: float = _parameter(
        0.0,
        help="DRY penalty on repeated sequences; 0 is off.",
        high=100,
        text="0 to 100; 0 is off; penalizes tokens that extend a repetition, as in llama.cpp",
        **_OPENAI_ONLY,
    )
    dry_base: float = _parameter(
        1.75,
        help="Factor by which the DRY penalty grows with each repeated token.",
        low=1,
        high=100,
        text="factor by which the DRY penalty grows with each repeated token; 1 to 100; default 1.75",
        **_OPENAI_ONLY,
    )
    dry_allowed_length: int = _parameter(
        2,
        help="Repeated sequences up to this length have no DRY penalty.",
        text="repetitions of up to this many tokens are not penalized; default 2",
        **_OPENAI_ONLY,
    )
    dry_penalty_last_n: int = _parameter(
        -1,
        help="Number of recent tokens that DRY searches for repetitions; -1: all.",
        low=-1,
        text="number of recent tokens that DRY searches for repetitions; -1 (default): all; 0 is off",
        **_OPENAI_ONLY,
    )
    dry_sequence_breakers: tuple[str, ...] = _parameter(
        DEFAULT_BREAKERS,
        help="Text that interrupts repetitions for DRY; repeatable (at most 32).",
        most=MAX_BREAKERS,
        characters=MAX_BREAKER_CHARACTERS,
        text=f'up to {MAX_BREAKERS} strings that interrupt repetitions; default: newline, `:`, `"` and `*`',
        **_OPENAI_ONLY,
    )
    given: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if parameter.is_list:
                object.__setattr__(self, name, _list(parameter, value))
            elif value is not None or parameter.default is not None:
                _check(parameter, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens", param="min_tokens")

    def with_defaults(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Return a copy in which fields that were not set have the values of `defaults`."""
        unset = {
            name: value
            for name, value in defaults.items()
            if name not in self.given and getattr(self, name) == PARAMETERS[name].default
        }
        return replace(self, **unset) if unset else self  # type: ignore[arg-type]

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0


_METAVARS = {(int, False): "N", (int, True): "ID", (str, True): "TEXT", (bool, False): ""}


def _complete_parameter(each: Field[Any], hint: Any) -> Parameter:
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), ...)]
    is_list = get_origin(hint) is tuple
    kind = kinds[0] if kinds and get_origin(hint) is not Mapping else get_origin(hint) or hint
    default = {} if each.default is MISSING else each.default
    parameter: Parameter = each.metadata["parameter"]
    metavar = parameter.metavar or _METAVARS.get((kind, is_list), f"{parameter.low:g}..{parameter.high:g}")
    return replace(parameter, name=each.name, default=default, kind=kind, is_list=is_list, metavar=metavar)


_HINTS = get_type_hints(SamplingParams)
PARAMETERS: Mapping[str, Parameter] = {
    each.name: _complete_parameter(each, _HINTS[each.name]) for each in fields(SamplingParams) if each.metadata
}
"""Sampling parameters by name."""


class SamplingSettings(TypedDict, total=False):
    """Keyword arguments for the fields of SamplingParams."""

    max_tokens: int | None
    thinking_budget: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    seed: int | None
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]


def _check(parameter: Parameter, value: object) -> None:
    name, low, high = parameter.name, parameter.low, parameter.high
    if parameter.kind is bool:
        require(isinstance(value, bool), name, "true or false")
    elif parameter.kind is int:
        _integer(name, value, low, high)
    elif parameter.kind is float:
        _number(name, value, low, high)
        require(not parameter.above or value != low, name, f"above {low:g} and at most {high:g}")
    else:
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name} must map token ids to numbers", param=name)
        if len(value) > parameter.most:
            raise InvalidRequestError(f"{name} must have at most {parameter.most} entries", param=name)
        for token, bias in value.items():
            _integer(name, token, 0, 1 << 31)
            _number(name, bias, low, high)


def _list(parameter: Parameter, value: object) -> tuple[Any, ...]:
    name, most, characters = parameter.name, parameter.most, parameter.characters
    counted, listed = ("strings", "strings") if characters else ("ids", "token ids")
    items = tuple(iterate(None if isinstance(value, str) else value, name, f"a sequence of {listed}"))
    if len(items) > most:
        raise InvalidRequestError(f"{name} must have at most {most} {counted}", param=name)
    for item in items:
        if not characters:
            _integer(name, item, parameter.low, parameter.high)
        elif not isinstance(item, str) or not 1 <= len(item) <= characters:
            message = f"strings in {name} must have 1 to {characters} characters"
            raise InvalidRequestError(message, param=name)
    return items


def _integer(name: str, value: object, low: float, high: float) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(fits, name, f"an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    # NaN is also rejected, because all comparisons with NaN are false.
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    require(fits, name, f"a number from {low:g} to {high:g}")
