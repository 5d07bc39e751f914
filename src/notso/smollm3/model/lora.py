"""Low-rank adapters: y = W x + B (A x), with W unchanged.

Adapters are not merged into W, so that W stays quantized and a step can compute sequences with different adapters.

Adapters are read from llama.cpp's GGUF files and PEFT folders. An unsupported setting that would change the results
raises an error that names the setting. Sources: llama.cpp's src/llama-adapter.cpp and convert_lora_to_gguf.py.

The settings in PEFT's `adapter_config.json` are checked against an allow-list. A setting is allowed if it is applied
here as PEFT applies it at load time, or if its value does not affect inference. Any other setting must be null, false
or empty. Source: PEFT 0.21.2, LoraConfig, tuners_utils.check_target_module_exists and LoraLayer.update_layer;
`tests/smollm3/tuning/test_peft_settings.py` compares the list with the installed PEFT.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import F32, Backend, GGUFFile, OperandError, QTensor, QTensorError, SafetensorsFile, Weight
from notso.smollm3.config import ARCHITECTURE, SmolLM3Config
from notso.smollm3.errors import AdapterFileError, ModelFileError, OutOfMemoryError, quoted
from notso.smollm3.model.weights import MATRICES, TENSOR_NAMES, interleave_rope_rows, matrix_shapes, module_name
from notso.smollm3.strict_json import OFF, is_one_of, json_or_none
from notso.system.files import file_type
from notso.text_file import read_regular

MAX_RANK = 512  # bounds the preallocated memory of a step


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank update B A of a matrix. Shapes: `a` (rank, inputs), `b` (outputs, rank). `a` includes the scale."""

    a: Weight
    b: Weight
    rank: int  # padded to a multiple of RANK_STEP


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter; `digest` is a hash of its values."""

    name: str
    digest: bytes
    nbytes: int
    rank: int  # largest rank in the file
    layers: tuple[Mapping[str, LowRank], ...]  # per layer, by field name of `LayerWeights`

    def to_device(self, backend: Backend) -> Adapter:
        layers = tuple(
            {role: replace(pair, a=backend.weight(pair.a), b=backend.weight(pair.b)) for role, pair in layer.items()}
            for layer in self.layers
        )
        return replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows [begin, end) and sampled rows [first, last) that use an adapter."""

    adapter: Adapter
    begin: int
    end: int
    first: int
    last: int

    def sampled(self) -> AdaptedRows:
        return AdaptedRows(self.adapter, self.first, self.last, self.first, self.last)


MAX_SETTING = 1e12  # maximum rank or alpha; JSON integers can exceed the range of a float

# Maximum number of entries in `rank_pattern` or `alpha_pattern` (7 matrices in each of 256 layers), and maximum length
# of a regular expression in any setting.
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 1792, 1000
_FOREIGN = re.compile(r"&&|--|~~|\|\||\[[^\]]*\[|\\[<>uU]|\\b\{")

# Settings that are applied.
COMPUTED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)

# Settings that do not affect inference.
HARMLESS = frozenset(
    {
        # provenance
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision"),
        # training only, and parameters of initialization methods
        *("inference_mode", "lora_dropout", "velora_config", "monteclora_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # for layers and models of other kinds, and for unsupported methods
        *("fan_in_fan_out", "ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)

# Settings that must be null, false or empty, and the unsupported feature that each of them enables.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA with biases",
    "modules_to_save": "replacing whole modules",
    "trainable_token_indices": "training of single tokens",
    "target_parameters": "LoRA on single parameters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron",
}

# Accepted values: with these, the update is the plain product B A.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica", "lora_ga"),
}

# Values of init_lora_weights that begin with one of these are rejected, because PEFT would also change the base model.
_CHANGES_BASE_MODEL = ("pissa", "olora", "corda", "loftq")

# Values of init_lora_weights with which PEFT's initial update B A is random. With other accepted values, it is zero.
_RANDOM = (None, False)

_LAYER_NAMES = ("layers", "model.layers")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Parsed adapter_config.json."""

    r: int
    lora_alpha: float
    use_rslora: bool
    draws_missing: bool  # whether PEFT's initial update is random, which matters if tensors are missing
    # Returns whether a module (such as `model.layers.0.mlp.up_proj`) is adapted, given its name and layer.
    adapts: Callable[[str, int], bool]
    _ranks: Sequence[tuple[Callable[[str], bool], Any]]
    _alphas: Sequence[tuple[Callable[[str], bool], Any]]

    @classmethod
    def parse(cls, raw: bytes) -> PeftConfig:
        """Parse the settings. Raises ModelFileError."""
        settings = json_or_none(raw)
        if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
            raise ModelFileError("adapter_config.json must be a JSON object whose peft_type is LORA")
        _reject_unknown(settings)
        for key in ("lora_alpha", "r"):
            if not _is_number(settings.get(key)):
                raise ModelFileError("lora_alpha and r must be numbers, and r must be at least 1")
        return cls(
            r=_rank("r", settings["r"]),
            lora_alpha=float(settings["lora_alpha"]),
            use_rslora=bool(settings.get("use_rslora")),
            draws_missing=settings.get("init_lora_weights", True) in _RANDOM,
            adapts=_target_filter(settings),
            _ranks=[
                (matches, _rank("rank_pattern", value))
                for matches, value in _compile_patterns(settings, "rank_pattern")
            ],
            _alphas=_compile_patterns(settings, "alpha_pattern"),
        )

    def rank(self, module: str) -> int:
        return int(_first_match(self._ranks, module, self.r))

    def scale(self, module: str) -> float:
        alpha, rank = float(_first_match(self._alphas, module, self.lora_alpha)), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _reject_unknown(settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key in CHOICES:
            normalized = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
            if not is_one_of(normalized, CHOICES[key]):
                raise ModelFileError(f"{key}: {quoted(value)} is not supported{_unsupported_hint(key, normalized)}")
        elif key in REFUSED:
            if value not in OFF:
                raise ModelFileError(f"{key}: {REFUSED[key]} is not supported")
        elif key not in COMPUTED and key not in HARMLESS and value not in OFF:
            raise ModelFileError(f"{quoted(key)}: unknown setting, which could change the results")


def _unsupported_hint(key: str, value: Any) -> str:
    if key != "init_lora_weights" or not isinstance(value, str) or not value.startswith(_CHANGES_BASE_MODEL):
        return ""
    return ": it changes the base model; save the adapter as plain LoRA, with path_initial_model_for_weight_conversion"


def _target_filter(settings: Mapping[str, Any]) -> Callable[[str, int], bool]:
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    pattern = settings.get("layers_pattern")
    if isinstance(targets, str) and (layers is not None or pattern):
        raise ModelFileError("layers_to_transform and layers_pattern require a list of target_modules")
    if pattern and not layers:
        raise ModelFileError("layers_pattern requires layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise ModelFileError(f"layers_to_transform must be a list of layers, not {quoted(layers)}")
    if pattern and not _matches_layer_list(pattern):
        layers = [-1]  # no list of layers has this name, so no layer matches
    excluded = _module_matcher("exclude_modules", settings.get("exclude_modules"), none=False)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = None  # all matrices of the layers, but not the head
    targeted = _module_matcher("target_modules", targets, none=True)
    whole = frozenset(targets) if isinstance(targets, list) else frozenset()

    def adapted(module: str, layer: int) -> bool:
        if excluded(module) or not targeted(module):
            return False
        return not layers or module in whole or layer in layers

    return adapted


def _matches_layer_list(pattern: Any) -> bool:
    names = [pattern] if isinstance(pattern, str) else pattern
    plain = re.compile(r"[\w.]+", re.ASCII)
    if not isinstance(names, list) or not all(isinstance(name, str) and plain.fullmatch(name) for name in names):
        raise ModelFileError(f"layers_pattern must be the name of a list of layers, not {quoted(pattern)}")
    return any(name in _LAYER_NAMES for name in names)


def _module_matcher(key: str, value: Any, *, none: bool) -> Callable[[str], bool]:
    # value: a list of names or suffixes, a regular expression for whole names, or None, for which the matcher always
    # returns `none`.
    if value is None or (key == "exclude_modules" and value in OFF):
        return lambda module: none
    if isinstance(value, str):
        return _compile_expression(key, value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelFileError(f"{key} must be a list of modules, not {quoted(value)}")
    exact, ends = frozenset(value), tuple(f".{name}" for name in value)
    return lambda module: module in exact or module.endswith(ends)


def _compile_patterns(settings: Mapping[str, Any], key: str) -> list[tuple[Callable[[str], bool], Any]]:
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ModelFileError(f"{key} must be an object of at most {MAX_PATTERNS:,} entries")
    if not all(map(_is_number, patterns.values())):
        raise ModelFileError(f"{key} must have numbers as values")
    return [(_compile_expression(key, name, at_end=True), value) for name, value in patterns.items()]


def _compile_expression(key: str, pattern: str, *, at_end: bool = False) -> Callable[[str], bool]:
    # at_end: match the last parts of a module's name, as PEFT does for `rank_pattern`.
    if not _has_one_meaning(pattern, *([rf"(.*\.)?({pattern})$"] if at_end else [])):
        raise ModelFileError(f"{key}: the expression {quoted(pattern)} is not supported")
    whole = rf"(?:.*\.)?(?:{pattern})" if at_end else pattern
    from pydantic import StringConstraints, TypeAdapter  # imported only if needed, because it is slow

    # pydantic's Rust engine matches in linear time, which is necessary for expressions from untrusted files.
    try:
        fits = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"\A(?:{whole})\z")]).validator
    except Exception:  # pydantic_core, which defines SchemaError, is not a declared dependency
        raise ModelFileError(f"{key}: the expression {quoted(pattern)} is not supported") from None
    return fits.isinstance_python


def _has_one_meaning(pattern: str, *in_peft: str) -> bool:
    # Returns whether a pattern that Rust's regular expressions accept means the same in Python's, which PEFT uses.
    # Python has no set operations, nested sets, word boundaries like \< and \b{start}, or spaces in counts; Rust has no
    # possessive quantifiers. Non-ASCII ranges would take long to compile.
    if len(pattern) > MAX_PATTERN_CHARACTERS or not pattern.isascii() or _FOREIGN.search(pattern):
        return False
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "_", re.sub(r"\\.", "_", pattern))  # without escapes or sets
    if re.search(r"[*+?}]\+|\(\?[a-zA-Z-]*x|\{[0-9,]*\s", plain):
        return False
    try:
        # The pattern must be valid by itself: `a)|(b` is valid only within the parentheses that are added around it.
        return all(map(re.compile, (pattern, *in_peft)))
    except (re.error, ValueError, OverflowError, RecursionError):  # ValueError: flags that contradict each other
        return False


def _first_match(patterns: Sequence[tuple[Callable[[str], bool], Any]], module: str, default: Any) -> Any:
    return next((value for matches, value in patterns if matches(module)), default)


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelFileError(f"{key}: a rank must be an integer of at least 1, not {quoted(value)}")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_SETTING <= value <= MAX_SETTING


PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
DIGEST_BYTES = 16
# A and B are zero-padded to a rank that is a multiple of the vector width, because a separate loop for the remainder
# would take longer.
RANK_STEP = 16

_GGUF_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.weight\.lora_([ab])", re.ASCII)
_PEFT_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d{1,4})\.\w+\.(\w+))\.lora_([AB])\.weight", re.ASCII)
_TRAINING_ONLY = (".lora_velora_embed", ".lora_monteclora_sampler.")
_ROLES = {TENSOR_NAMES[role]: role for role in MATRICES}
# Supported `adapter.*` keys. The task name and the prompt prefix do not affect results: llama.cpp only displays them.
_GGUF_KEYS = {"type", "lora.alpha", "lora.task_name", "lora.prompt_prefix"}

Place = tuple[int, str, str]  # layer, name in LayerWeights, and either "a" or "b"
Floats = npt.NDArray[np.float32]
# Returns the scale of a matrix's update, given the layer, the name in LayerWeights and the rank.
Factor = Callable[[int, str, int], float]

_log = logging.getLogger(__name__)


def read_adapter(
    name: str, path: Path, config: SmolLM3Config, scale: float = 1.0, available_bytes: int | None = None
) -> Adapter:
    """Read an adapter's GGUF file or PEFT folder; `scale` multiplies the file's own scale.

    Raises AdapterFileError, or OutOfMemoryError if the tensors exceed `available_bytes`.
    """
    tensors = _TensorCollector(name, config, {}, available_bytes)
    try:
        if not (found_type := file_type(path)):
            raise ModelFileError("no such file")
        factor = (_from_peft if stat.S_ISDIR(found_type) else _from_gguf)(path, tensors, scale)
        return _build_adapter(name, config, tensors.found, factor)
    except (ModelFileError, QTensorError) as error:
        raise _adapter_error(path, f"{path.name}: {error}") from None
    except OSError as error:
        within = Path(str(error.filename or path)).name  # name of the adapter, or of a file in its folder
        place = path.name if within == path.name else f"{path.name}: {within}"
        raise _adapter_error(path, f"{place} cannot be read: {error.strerror}") from None


def _adapter_error(path: Path, message: str) -> AdapterFileError:
    error = AdapterFileError(message)
    error.path = str(path)
    return error


@dataclass(slots=True)
class _TensorCollector:
    # Checks each tensor before it is copied, because a sparse file can declare more data than memory can hold.
    name: str
    config: SmolLM3Config
    found: dict[Place, QTensor]
    available_bytes: int | None
    nbytes: int = 0

    def add_tensor(self, place: Place, tensor: QTensor, *, head_dim: int = 0) -> None:
        # `head_dim`: head dimension if the rows of each head must be reordered, else 0.
        layer, role, part = place
        if layer >= self.config.num_hidden_layers:
            raise ModelFileError(f"it changes layer {layer}, but this model has {self.config.num_hidden_layers} layers")
        outputs, inputs = matrix_shapes(self.config)[role]
        shape = tensor.shape if part == "a" else tensor.shape[::-1]
        side = inputs if part == "a" else outputs
        if len(shape) != 2 or shape[1] != side or not 1 <= shape[0] <= MAX_RANK:
            raise ModelFileError(
                f"layer {layer}, {role}: {part.upper()} has shape {tensor.shape}; this model needs A of shape "
                f"(r, {inputs}) and B of shape ({outputs}, r), with r from 1 to {MAX_RANK}"
            )
        self.nbytes += tensor.nbytes
        if self.available_bytes is not None and self.nbytes > self.available_bytes:
            raise OutOfMemoryError(
                f"adapter {self.name} needs more than the {self.available_bytes:,} bytes available",
                needed_bytes=self.nbytes,
                available_bytes=self.available_bytes,
            )
        self.found[place] = _interleaved(tensor, head_dim) if head_dim else replace(tensor, data=tensor.data.copy())


def _from_gguf(path: Path, tensors: _TensorCollector, scale: float) -> Factor:
    with GGUFFile.open(path) as file:
        found = {key: file.metadata.get(key) for key in ("general.type", "general.architecture", "adapter.type")}
        if found["general.type"] != "adapter" or found["adapter.type"] != "lora":
            raise ModelFileError("it is not a LoRA adapter: general.type must be 'adapter' and adapter.type 'lora'")
        if found["general.architecture"] != ARCHITECTURE:
            raise ModelFileError(f"it is for {quoted(found['general.architecture'])}, not for {ARCHITECTURE}")
        if "adapter.alora.invocation_tokens" in file.metadata:
            raise ModelFileError("activated LoRA is not supported")
        for key in file.metadata:
            if key.startswith("adapter.") and key.removeprefix("adapter.") not in _GGUF_KEYS:
                raise ModelFileError(f"{quoted(key)}: unknown setting, which could change the results")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise ModelFileError("adapter.lora.alpha must be a number")
        for tensor in file.tensors.values():
            place = _GGUF_NAME.fullmatch(tensor.name)
            if place is None or place[2] not in _ROLES:
                raise ModelFileError(f"it changes {quoted(tensor.name)}, which is not supported")
            tensors.add_tensor((int(place[1]), _ROLES[place[2]], place[3]), tensor)
    return lambda layer, role, rank: scale * alpha / rank if alpha else scale


def _from_peft(folder: Path, tensors: _TensorCollector, scale: float) -> Factor:
    peft = PeftConfig.parse(read_regular(folder / PEFT_CONFIG, MAX_CONFIG_BYTES))
    left_out = 0
    with SafetensorsFile(folder / PEFT_WEIGHTS) as file:
        for tensor in file.tensors.values():
            if any(part in tensor.name for part in _TRAINING_ONLY):
                continue
            named = _PEFT_NAME.fullmatch(tensor.name)
            if named is None or named[3] not in MATRICES or named[1] != _module_name(int(named[2]), named[3]):
                raise ModelFileError(f"it changes {quoted(tensor.name)}, which is not supported")
            module, layer, role, part = named[1], int(named[2]), named[3], named[4].lower()
            if not peft.adapts(module, layer):
                left_out += 1
                continue
            rank = tensor.shape[0 if part == "a" else -1] if tensor.shape else 0
            if rank != peft.rank(module):
                raise ModelFileError(
                    f"{quoted(tensor.name)} has rank {rank}, but {PEFT_CONFIG} (r, rank_pattern) specifies "
                    f"{peft.rank(module)}"
                )
            has_rope = part == "b" and role in ("q_proj", "k_proj")
            tensors.add_tensor((layer, role, part), tensor, head_dim=tensors.config.head_dim if has_rope else 0)
    if left_out:
        _log.warning(
            "adapter %s: %d tensors belong to modules excluded by its %s and are ignored, as in PEFT",
            tensors.name,
            left_out,
            PEFT_CONFIG,
        )
    if peft.draws_missing:
        for layer in range(tensors.config.num_hidden_layers):
            for role in MATRICES:
                if peft.adapts(_module_name(layer, role), layer) and (layer, role, "a") not in tensors.found:
                    raise ModelFileError(
                        f"layer {layer}, {role}: tensors are missing, and init_lora_weights would set them randomly"
                    )
    return lambda layer, role, rank: scale * peft.scale(_module_name(layer, role))


def _module_name(layer: int, role: str) -> str:
    return f"model.layers.{layer}.{module_name(role)}"


def _interleaved(tensor: QTensor, head_dim: int) -> QTensor:
    if len(tensor.shape) != 2 or tensor.rows % head_dim:
        raise ModelFileError(f"{quoted(tensor.name)} does not consist of heads of {head_dim} rows")
    rows = interleave_rope_rows(tensor.data.reshape(-1, tensor.row_bytes), head_dim)
    return replace(tensor, data=rows.reshape(-1))


def _build_adapter(name: str, config: SmolLM3Config, tensors: dict[Place, QTensor], factor: Factor) -> Adapter:
    layers: list[dict[str, LowRank]] = [{} for _ in range(config.num_hidden_layers)]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    nbytes = most = 0
    for layer, role, a, b in _matrix_pairs(tensors):
        rank = a.shape[0]
        if b.shape[1] != rank:
            raise ModelFileError(f"layer {layer}, {role}: A {a.shape} and B {b.shape} have different ranks")
        padding = -rank % RANK_STEP
        a, b = _pad_matrix(a, padding, 0), _pad_matrix(b, 0, padding)
        pair = LowRank(_scale_tensor(a, factor(layer, role, rank)), _scale_tensor(b, 1.0), rank + padding)
        layers[layer][role] = pair
        for part in (pair.a, pair.b):
            digest.update(f"{layer} {role} {part.format} {part.shape}".encode())
            digest.update(part.data)
            nbytes += part.nbytes
        most = max(most, rank)
    if not most:
        raise ModelFileError("it has no tensors")
    return Adapter(name, digest.digest(), nbytes, most, tuple(layers))


def _matrix_pairs(tensors: dict[Place, QTensor]) -> Iterator[tuple[int, str, QTensor, QTensor]]:
    for layer, role in sorted({place[:2] for place in tensors}):
        a, b = tensors.get((layer, role, "a")), tensors.get((layer, role, "b"))
        if a is None or b is None:
            raise ModelFileError(f"layer {layer}, {role}: A or B is missing")
        yield layer, role, a, b


def _pad_matrix(tensor: QTensor, rows: int, columns: int) -> QTensor:
    # Zero padding does not change the products.
    if not rows and not columns:
        return tensor
    height, width = tensor.shape
    value_bytes = tensor.row_bytes // width
    padded = np.pad(tensor.data.reshape(height, -1), ((0, rows), (0, columns * value_bytes)))
    return replace(tensor, shape=(height + rows, width + columns), data=padded.reshape(-1))


def _scale_tensor(tensor: QTensor, factor: float) -> QTensor:
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = tensor.dequantize() * np.float32(factor)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{quoted(tensor.name)} contains NaN or infinity")
        # Keep a 16-bit format if it represents the scaled values exactly.
        if tensor.format.block_values == 1 and tensor.format != F32:
            with suppress(OperandError):  # raised if values exceed the range of F16
                halves = QTensor.quantize(values, tensor.format, tensor.name)
                if np.array_equal(halves.dequantize(), values):
                    return halves
    return QTensor.quantize(values, F32, tensor.name)
