"""Readers of LoRA adapters: llama.cpp's GGUF files and PEFT folders.

Settings that would change the results are refused by name. Sources: llama.cpp's src/llama-adapter.cpp and
convert_lora_to_gguf.py; for PEFT see `peft_config.py`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor import F32, GGUFFile, QTensor, QTensorError, SafetensorsFile
from notso.smollm3.config import ARCHITECTURE, SmolLM3Config
from notso.smollm3.errors import AdapterFileError, ModelFileError, OutOfMemoryError, quoted
from notso.smollm3.model.lora import MAX_RANK, Adapter, LowRank
from notso.smollm3.model.peft_config import PeftConfig
from notso.smollm3.model.weights import MATRICES, TENSOR_NAMES, matrix_shapes
from notso.text_file import read_regular

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
DIGEST_BYTES = 16
# Ranks are zero-padded to a multiple of the vector width: the ragged end of short rows costs more.
RANK_STEP = 16

_GGUF_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.weight\.lora_([ab])", re.ASCII)
_PEFT_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d{1,4})\.\w+\.(\w+))\.lora_([AB])\.weight", re.ASCII)
_TRAINING_ONLY = (".lora_velora_embed", ".lora_monteclora_sampler.")
_ROLES = {TENSOR_NAMES[role]: role for role in MATRICES}
# Supported `adapter.*` keys. llama.cpp shows the last two and applies neither.
_GGUF_KEYS = {"type", "lora.alpha", "lora.task_name", "lora.prompt_prefix"}

Place = tuple[int, str, str]  # layer, name in LayerWeights, "a" or "b"
Floats = npt.NDArray[np.float32]
# Scale of a matrix's product, from layer, name in LayerWeights and rank.
Factor = Callable[[int, str, int], float]

_log = logging.getLogger(__name__)


def read_adapter(
    name: str, path: Path, config: SmolLM3Config, scale: float = 1.0, available_bytes: int | None = None
) -> Adapter:
    """Read a GGUF file or PEFT folder completely; `scale` multiplies its own.

    Raises ModelFileError naming the file, OutOfMemoryError above `available_bytes`.
    """
    tensors = _Tensors(name, config, {}, available_bytes)
    try:
        if not path.exists():
            raise ModelFileError("no such file")
        factor = (_from_peft if path.is_dir() else _from_gguf)(path, tensors, scale)
        return _adapter(name, config, tensors.found, factor)
    except (ModelFileError, QTensorError) as error:
        raise _at_fault(path, f"{path.name}: {error}") from None
    except OSError as error:
        within = Path(str(error.filename or path)).name  # a file within a folder
        place = path.name if within == path.name else f"{path.name}: {within}"
        raise _at_fault(path, f"{place} cannot be read: {error.strerror}") from None


def _at_fault(path: Path, message: str) -> AdapterFileError:
    error = AdapterFileError(message)
    error.path = str(path)
    return error


@dataclass(slots=True)
class _Tensors:
    # Tensors are checked before they are copied: a sparse file can claim more than the available memory.
    name: str
    config: SmolLM3Config
    found: dict[Place, QTensor]
    available_bytes: int | None
    nbytes: int = 0

    def take(self, place: Place, tensor: QTensor, *, head_dim: int = 0) -> None:
        # `head_dim` is set if the rows of heads are reordered.
        layer, role, part = place
        if layer >= self.config.num_hidden_layers:
            raise ModelFileError(f"it changes layer {layer}; this model has {self.config.num_hidden_layers}")
        outputs, inputs = matrix_shapes(self.config)[role]
        shape = tensor.shape if part == "a" else tensor.shape[::-1]
        side = inputs if part == "a" else outputs
        if len(shape) != 2 or shape[1] != side or not 1 <= shape[0] <= MAX_RANK:
            raise ModelFileError(
                f"layer {layer}, {role}: {part.upper()} is {tensor.shape}; for this model A is (r, {inputs}) and B "
                f"({outputs}, r), r from 1 to {MAX_RANK}"
            )
        self.nbytes += tensor.nbytes
        if self.available_bytes is not None and self.nbytes > self.available_bytes:
            raise OutOfMemoryError(
                f"adapter {self.name} needs more than the {self.available_bytes:,} bytes available",
                needed_bytes=self.nbytes,
                available_bytes=self.available_bytes,
            )
        self.found[place] = _in_pairs(tensor, head_dim) if head_dim else _copy(tensor)


def _from_gguf(path: Path, tensors: _Tensors, scale: float) -> Factor:
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
            tensors.take((int(place[1]), _ROLES[place[2]], place[3]), tensor)
    return lambda layer, role, rank: scale * alpha / rank if alpha else scale


def _from_peft(folder: Path, tensors: _Tensors, scale: float) -> Factor:
    peft = PeftConfig.parse(read_regular(folder / PEFT_CONFIG, MAX_CONFIG_BYTES))
    left_out = 0
    with SafetensorsFile(folder / PEFT_WEIGHTS) as file:
        for tensor in file.tensors.values():
            if any(part in tensor.name for part in _TRAINING_ONLY):
                continue
            named = _PEFT_NAME.fullmatch(tensor.name)
            if named is None or named[3] not in MATRICES or named[1] != _module(int(named[2]), named[3]):
                raise ModelFileError(f"it changes {quoted(tensor.name)}, which is not supported")
            module, layer, role, part = named[1], int(named[2]), named[3], named[4].lower()
            if not peft.adapts(module, layer):
                left_out += 1
                # PEFT ignores tensors of excluded modules, too.
                continue
            rank = tensor.shape[0 if part == "a" else -1] if tensor.shape else 0
            if rank != peft.rank(module):
                raise ModelFileError(
                    f"{quoted(tensor.name)} is of rank {rank}, {PEFT_CONFIG} (r, rank_pattern) says {peft.rank(module)}"
                )
            turned = part == "b" and role in ("q_proj", "k_proj")
            tensors.take((layer, role, part), tensor, head_dim=tensors.config.head_dim if turned else 0)
    if left_out:
        _log.warning(
            "adapter %s: %d tensors belong to modules excluded by its %s and are not used, as in PEFT",
            tensors.name,
            left_out,
            PEFT_CONFIG,
        )
    if peft.draws_missing:
        for layer in range(tensors.config.num_hidden_layers):
            for role in MATRICES:
                if peft.adapts(_module(layer, role), layer) and (layer, role, "a") not in tensors.found:
                    raise ModelFileError(
                        f"layer {layer}, {role}: its tensors are missing, and init_lora_weights is random"
                    )
    return lambda layer, role, rank: scale * peft.scale(_module(layer, role))


def _module(layer: int, role: str) -> str:
    block = "mlp" if role in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{block}.{role}"


def _in_pairs(tensor: QTensor, head_dim: int) -> QTensor:
    # GGUF row order: rotated pairs are adjacent.
    if len(tensor.shape) != 2 or tensor.rows % head_dim:
        raise ModelFileError(f"{quoted(tensor.name)} does not consist of heads of {head_dim} rows")
    heads = tensor.data.reshape(-1, 2, head_dim // 2, tensor.row_bytes).swapaxes(1, 2)
    return QTensor(tensor.name, tensor.format, tensor.shape, np.ascontiguousarray(heads).reshape(-1))


def _copy(tensor: QTensor) -> QTensor:
    return QTensor(tensor.name, tensor.format, tensor.shape, tensor.data.copy())


def _adapter(name: str, config: SmolLM3Config, tensors: dict[Place, QTensor], factor: Factor) -> Adapter:
    layers: list[dict[str, LowRank]] = [{} for _ in range(config.num_hidden_layers)]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    nbytes = most = 0
    for layer, role, a, b in _pairs(tensors):
        rank = a.shape[0]
        if b.shape[1] != rank:
            raise ModelFileError(f"layer {layer}, {role}: A is {a.shape} and B {b.shape}, which have different ranks")
        padding = -rank % RANK_STEP
        a, b = _widened(a, padding, 0), _widened(b, 0, padding)
        pair = LowRank(_times(a, factor(layer, role, rank)), _times(b, 1.0), rank + padding)
        layers[layer][role] = pair
        for part in (pair.a, pair.b):
            digest.update(f"{layer} {role} {part.format} {part.shape}".encode())
            digest.update(part.data)
            nbytes += part.nbytes
        most = max(most, rank)
    if not most:
        raise ModelFileError("it has no tensors")
    return Adapter(name, digest.digest(), nbytes, most, tuple(layers))


def _pairs(tensors: dict[Place, QTensor]) -> Iterator[tuple[int, str, QTensor, QTensor]]:
    for layer, role in sorted({place[:2] for place in tensors}):
        a, b = tensors.get((layer, role, "a")), tensors.get((layer, role, "b"))
        if a is None or b is None:
            raise ModelFileError(f"layer {layer}, {role}: A or B is missing")
        yield layer, role, a, b


def _widened(tensor: QTensor, rows: int, columns: int) -> QTensor:
    # Zero padding changes no bit of a product.
    if not rows and not columns:
        return tensor
    height, width = tensor.shape
    value_bytes = tensor.row_bytes // width
    padded = np.pad(tensor.data.reshape(height, -1), ((0, rows), (0, columns * value_bytes)))
    return QTensor(tensor.name, tensor.format, (height + rows, width + columns), padded.reshape(-1))


def _times(tensor: QTensor, factor: float) -> QTensor:
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = tensor.dequantise() * np.float32(factor)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{quoted(tensor.name)} contains NaN or infinity")
        # Half precision is kept where it holds the scaled values exactly.
        if tensor.format.block_values == 1 and tensor.format != F32:
            halves = QTensor.quantise(values, tensor.format, tensor.name)
            if np.array_equal(halves.dequantise(), values):
                return halves
    return QTensor.quantise(values, F32, tensor.name)
