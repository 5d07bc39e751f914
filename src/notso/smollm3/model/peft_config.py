"""PEFT's `adapter_config.json`: adapted modules, ranks and scales.

Settings are read by allow-list: each is computed as PEFT does at load time, has no effect on inference at the allowed
values, or is refused by name. Source: PEFT 0.21.2, LoraConfig, tuners_utils.check_target_module_exists and
LoraLayer.update_layer; `tests/smollm3/tuning/test_peft_settings.py` compares the table with the installed PEFT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from notso.smollm3.errors import ModelFileError, quoted

MAX_SETTING = 1e12  # limit of a rank or alpha; JSON has integers that no float holds

# Limits of `rank_pattern` and `alpha_pattern`: as many entries as a model of 256 layers has matrices.
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 1792, 1000

COMPUTED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)

# Settings without effect on inference.
HARMLESS = frozenset(
    {
        # provenance
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision"),
        # training only, and parameters of initialization methods
        *("inference_mode", "lora_dropout", "velora_config", "monteclora_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # layer and model kinds that SmolLM3 lacks, and settings of refused methods
        *("fan_in_fan_out", "ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)

# Unsupported unless null, false or empty.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "biases in an adapter",
    "modules_to_save": "whole modules in an adapter",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "megatron_config": "adapters of Megatron",
}

# Values that add a plain product of A and B. PiSSA, OLoRA, CorDA and LoftQ change the base model.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica", "lora_ga"),
}

# Values of init_lora_weights that initialize missing tensors at random.
_RANDOM = (None, False)

_OFF: tuple[object, ...] = (None, False, [], {}, "")
_LAYER_NAMES = ("layers", "model.layers")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Parsed adapter_config.json."""

    r: int
    lora_alpha: float
    use_rslora: bool
    draws_missing: bool  # modules without tensors are initialized at random
    _adapted: Callable[[str, int], bool]
    _ranks: Sequence[tuple[Callable[[str], bool], Any]]
    _alphas: Sequence[tuple[Callable[[str], bool], Any]]

    @classmethod
    def parse(cls, raw: bytes) -> PeftConfig:
        """Parse the settings. Raises ModelFileError naming the setting."""
        try:
            settings = json.loads(raw)
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
            raise ModelFileError("adapter_config.json must be JSON of a LoRA adapter (peft_type LORA)")
        _refuse_unknown(settings)
        for key in ("lora_alpha", "r"):
            if not _is_number(settings.get(key)):
                raise ModelFileError("lora_alpha and r must be numbers, r at least 1")
        return cls(
            r=_rank("r", settings["r"]),
            lora_alpha=float(settings["lora_alpha"]),
            use_rslora=bool(settings.get("use_rslora")),
            draws_missing=settings.get("init_lora_weights", True) in _RANDOM,
            _adapted=_targets(settings),
            _ranks=[(matches, _rank("rank_pattern", value)) for matches, value in _patterns(settings, "rank_pattern")],
            _alphas=_patterns(settings, "alpha_pattern"),
        )

    def adapts(self, module: str, layer: int) -> bool:
        """Whether a module such as `model.layers.0.mlp.up_proj` has an adapter."""
        return self._adapted(module, layer)

    def rank(self, module: str) -> int:
        return int(_first(self._ranks, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor on B A."""
        alpha, rank = float(_first(self._alphas, module, self.lora_alpha)), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key in CHOICES:
            known = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
            if not any(known is choice or (isinstance(choice, str) and known == choice) for choice in CHOICES[key]):
                raise ModelFileError(f"{key}: {quoted(value)} is not supported{_advice(key)}")
        elif key in REFUSED:
            if value not in _OFF:
                raise ModelFileError(f"{key}: {REFUSED[key]} is not supported")
        elif key not in COMPUTED and key not in HARMLESS and value not in _OFF:
            raise ModelFileError(f"{quoted(key)}: unknown setting, which could change the results")


def _advice(key: str) -> str:
    if key != "init_lora_weights":
        return ""
    return ": it changes the base model; save it with path_initial_model_for_weight_conversion, as plain LoRA"


def _targets(settings: Mapping[str, Any]) -> Callable[[str, int], bool]:
    wanted, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    pattern = settings.get("layers_pattern")
    if isinstance(wanted, str) and (layers is not None or pattern):
        raise ModelFileError("layers_to_transform and layers_pattern require a list of target_modules")
    if pattern and layers is None:
        raise ModelFileError("layers_pattern requires layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise ModelFileError(f"layers_to_transform must be a list of layers, not {quoted(layers)}")
    if pattern and not _names_layers(pattern):
        layers = [-1]  # no module list has that name, so PEFT adapts nothing
    excluded = _names("exclude_modules", settings.get("exclude_modules"), none=False)
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        wanted = None  # every matrix of a layer; the head is excluded
    targeted = _names("target_modules", wanted, none=True)
    whole = frozenset(wanted) if isinstance(wanted, list) else frozenset()

    def adapted(module: str, layer: int) -> bool:
        if excluded(module) or not targeted(module):
            return False
        return not layers or module in whole or layer in layers

    return adapted


def _names_layers(pattern: Any) -> bool:
    names = [pattern] if isinstance(pattern, str) else pattern
    plain = re.compile(r"[\w.]+", re.ASCII)
    if not isinstance(names, list) or not all(isinstance(name, str) and plain.fullmatch(name) for name in names):
        raise ModelFileError(f"layers_pattern must be the name of a list of layers, not {quoted(pattern)}")
    return any(name in _LAYER_NAMES for name in names)


def _names(key: str, value: Any, *, none: bool) -> Callable[[str], bool]:
    # Names or suffixes in a list, or an expression for whole names. `none`: the answer if nothing is specified.
    if value is None or (key == "exclude_modules" and value in _OFF):
        return lambda module: none
    if isinstance(value, str):
        return _expression(key, value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelFileError(f"{key} must be a list of modules, not {quoted(value)}")
    exact, ends = frozenset(value), tuple(f".{name}" for name in value)
    return lambda module: module in exact or module.endswith(ends)


def _patterns(settings: Mapping[str, Any], key: str) -> list[tuple[Callable[[str], bool], Any]]:
    given = settings.get(key) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise ModelFileError(f"{key} must be an object of at most {MAX_PATTERNS:,} entries")
    if not all(map(_is_number, given.values())):
        raise ModelFileError(f"{key} must have numbers as values")
    return [(_expression(key, rf"(?:.*\.)?(?:{name})"), value) for name, value in given.items()]


def _expression(key: str, pattern: str) -> Callable[[str], bool]:
    # Nested sets exist in Rust only.
    if len(pattern) > MAX_PATTERN_CHARACTERS or re.search(r"&&|--|~~|\[[^\]]*\[", pattern):
        raise ModelFileError(f"{key}: the expression {quoted(pattern)} is not supported")
    # pydantic's Rust engine runs in linear time, which untrusted files require.
    try:
        fits = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"\A(?:{pattern})\z")]).validator
    except Exception:  # pydantic_core, which defines SchemaError, is no declared dependency
        raise ModelFileError(f"{key}: the expression {quoted(pattern)} is not supported") from None
    return fits.isinstance_python


def _first(patterns: Sequence[tuple[Callable[[str], bool], Any]], module: str, default: Any) -> Any:
    return next((value for matches, value in patterns if matches(module)), default)


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelFileError(f"{key}: a rank must be an integer, and r at least 1, not {quoted(value)}")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_SETTING <= value <= MAX_SETTING
