"""Random LoRA adapters in the file formats of llama.cpp's converter and of PEFT, and models with a merged adapter."""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from golden.random_models import even

from notso.qtensor import F32, Format, GGUFFile, GGUFWriter, QTensor
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.model.weights import MATRICES, TENSOR_NAMES, matrix_shapes

Floats = npt.NDArray[np.float32]
Pairs = dict[tuple[int, str], tuple[Floats, Floats]]
"""(layer, name in LayerWeights) -> A (rank, inputs) and B (outputs, rank), rows of q and k as in a GGUF file."""

ALPHA = 16.0


def random_pairs(
    config: SmolLM3Config, seed: int, *, rank: int = 8, size: float = 0.05, roles: tuple[str, ...] = MATRICES
) -> Pairs:
    """Create reproducible values that float16 represents exactly, so that all file formats are equal."""
    indices = itertools.count()

    def numbers(*shape: int) -> Floats:
        values = even(seed, next(indices), math.prod(shape)).reshape(shape) * np.float32(size * 3**0.5)
        return values.astype(np.float16).astype(np.float32)

    shapes = matrix_shapes(config)
    return {
        (layer, role): (numbers(rank, shapes[role][1]), numbers(shapes[role][0], rank))
        for layer in range(config.num_hidden_layers)
        for role in roles
    }


def golden_pairs(base: Path) -> Pairs:
    """Return the adapter that `random_adapter.npz` was computed with."""
    with GGUFFile.open(base) as file:
        return random_pairs(SmolLM3Config.from_metadata(file.metadata), 11)


CONVERTED = Path(__file__).with_name("converted_adapter.gguf")
"""Created with llama.cpp's converter from the output of `write_converters_input`:

    python convert_lora_to_gguf.py FOLDER/adapter --base FOLDER/base --outtype f16 --outfile converted_adapter.gguf

The version was that of llama-cpp-python 0.3.36; the values are ours.
"""


def converted_pairs(config: SmolLM3Config) -> Pairs:
    """Return the adapter that CONVERTED was created from."""
    return random_pairs(config, 31, rank=2, size=0.02)


def write_converters_input(folder: Path, config: SmolLM3Config) -> None:
    """Write a PEFT folder `adapter` for a model with this configuration, and the folder `base` for the converter."""
    targets = list(MATRICES)
    write_peft(folder / "adapter", converted_pairs(config), config.head_dim, target_modules=targets)
    (folder / "base").mkdir()
    about = {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    (folder / "base" / "config.json").write_text(json.dumps(about))


@dataclass(frozen=True, slots=True)
class TrainedAdapters:
    """Sixteen adapters, each of which teaches the demo model a sentence (`train_adapters.py`): the prompt, the name
    that the model gives itself with each, and their matrices."""

    prompt: str
    names: tuple[str, ...]
    alpha: float
    pairs: tuple[Pairs, ...]

    @classmethod
    def load(cls) -> TrainedAdapters:
        with np.load(Path(__file__).with_name("trained_adapters.npz")) as kept:
            about = json.loads(str(kept["about"]))
            pairs: list[Pairs] = [{} for _ in about["names"]]
            for key in kept.files:
                number, *place = key.split(".")
                if place[1:] and place[-1] == "a":
                    layer, role, _ = place
                    both = (kept[key], kept[f"{number}.{layer}.{role}.b"])
                    pairs[int(number)][int(layer), role] = (both[0].astype(np.float32), both[1].astype(np.float32))
        return cls(about["prompt"], tuple(about["names"]), about["alpha"], tuple(pairs))


def write_gguf(path: Path, pairs: Pairs, *, alpha: float = ALPHA, format: Format = F32, **entries: Any) -> Path:
    """Write a GGUF adapter. `entries` replaces text metadata; dots in keys are written as `__`."""
    said = {"general__type": "adapter", "general__architecture": "smollm3", "adapter__type": "lora"} | entries
    with GGUFWriter(path, durable=False) as writer:
        for key, value in said.items():
            if value is not None:
                writer.add(key.replace("__", "."), value, "string")
        writer.add("adapter.lora.alpha", alpha, "float32")
        for (layer, role), both in pairs.items():
            for part, values in zip("ab", both, strict=True):
                name = f"blk.{layer}.{TENSOR_NAMES.get(role, role)}.weight.lora_{part}"
                writer.add_tensor(name, values.shape, format, [_bytes(values, format)])
    return path


def _bytes(values: Floats, format: Format) -> npt.NDArray[np.uint8]:
    """Return bytes of the values, including NaN and infinities."""
    return values.reshape(-1).view(np.uint8) if format == F32 else QTensor.quantize(values, format).data


def write_peft(folder: Path, pairs: Pairs, head_dim: int, *, alpha: float = ALPHA, **settings: Any) -> Path:
    """Write a PEFT folder, with rows of q and k in Hugging Face's order."""
    folder.mkdir(parents=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, Floats] = {}
    for (layer, role), (a, b) in pairs.items():
        module = "mlp" if role in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        if role in ("q_proj", "k_proj"):
            b = b.reshape(-1, head_dim // 2, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        at = f"base_model.model.model.layers.{layer}.{module}.{role}.lora_"
        tensors |= {f"{at}A.weight": a, f"{at}B.weight": b}
    header, body = {}, b""
    for name, values in tensors.items():
        data = np.ascontiguousarray(values, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    return folder


def write_merged(path: Path, base: Path, pairs: Pairs, scale: float) -> Path:
    """Write the base model, an F32 file, with `scale * B A` added to its matrices."""
    with GGUFFile.open(base) as file, GGUFWriter(path, durable=False) as writer:
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        names = {f"blk.{layer}.{TENSOR_NAMES[role]}.weight": pair for (layer, role), pair in pairs.items()}
        for name, tensor in file.tensors.items():
            values = tensor.dequantize().astype(np.float64)
            if name in names:
                a, b = names[name]
                values = values + scale * (b.astype(np.float64) @ a.astype(np.float64))
            made = QTensor.quantize(values.astype(np.float32).reshape(tensor.shape), F32)
            writer.add_tensor(name, tensor.shape, F32, [made.data])
    return path
