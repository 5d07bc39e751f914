"""Write LoRA adapters, as GGUF files or merged into the base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor import F16, F32, GGUFFile, GGUFWriter, OperandError, QTensor
from notso.smollm3.config import ARCHITECTURE, SmolLM3Config
from notso.smollm3.conversion.converter import copy_metadata, quantize_chunks, tensor_format
from notso.smollm3.conversion.hf_folder import FolderTensor
from notso.smollm3.model.lora import read_adapter
from notso.smollm3.model.weights import TENSOR_NAMES

Floats = npt.NDArray[np.float32]


def write_adapter(peft_folder: Path, base: Path, out: Path, name: str) -> int:
    """Write a PEFT folder's adapter as a GGUF file; return the size of its tensors in bytes.

    Raises GGUFError, ModelFileError or OSError.
    """
    with GGUFFile.open(base) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
    adapter = read_adapter(name, peft_folder, config)
    writer = GGUFWriter(out)
    writer.add("general.type", "adapter", "string")
    writer.add("general.architecture", ARCHITECTURE, "string")
    writer.add("general.name", name, "string")
    writer.add("adapter.type", "lora", "string")
    writer.add("adapter.lora.alpha", 0.0, "float32")  # 0 means that the values are already scaled
    for index, layer in enumerate(adapter.layers):
        for role, pair in layer.items():
            for part, tensor in (("a", pair.a), ("b", pair.b)):
                values = tensor.dequantize()
                stored = QTensor.quantize(values, F32)
                with suppress(OperandError):  # raised if values are outside the range of F16
                    halves = QTensor.quantize(values, F16)
                    stored = halves if _is_near(halves.dequantize(), values) else stored
                tensor_name = f"blk.{index}.{TENSOR_NAMES[role]}.weight.lora_{part}"
                # The shape may have a larger rank than in the source, because `read_adapter` pads it.
                writer.add_tensor(tensor_name, tensor.shape, stored.format, stored.data)
    writer.write()
    return writer.tensor_bytes


def _is_near(halves: Floats, values: Floats) -> bool:
    # Rounding errors exceed this bound only if all values are subnormal in F16.
    return float(np.abs(halves - values).max()) <= 2**-11 * float(np.abs(values).max())


def write_merged(peft_folder: Path, base: Path, out: Path, mix: str, threads: int | None = None) -> int:
    """Write `base` with the adapter merged in, quantized as `mix`; return the size of its tensors in bytes.

    Raises the same errors as `write_adapter`, and InvalidRequestError for incomplete blocks.
    """
    with GGUFFile.open(base) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        adapter = read_adapter("merged", peft_folder, config)
        added = {
            f"blk.{index}.{TENSOR_NAMES[role]}.weight": (pair.b.dequantize(), pair.a.dequantize())
            for index, layer in enumerate(adapter.layers)
            for role, pair in layer.items()
        }
        writer = GGUFWriter(out)
        copy_metadata(file, writer, mix)

        def rows(tensor: QTensor) -> Iterator[Floats]:
            pair = added.get(tensor.name)
            start = 0
            for values in FolderTensor(tensor.name, tensor).chunks():
                yield values if pair is None else values + pair[0][start : start + len(values)] @ pair[1]
                start += len(values)

        is_tied = "output.weight" not in file.tensors
        for name, tensor in file.tensors.items():
            format = tensor_format(mix, name, tensor.shape, config.num_hidden_layers, is_tied=is_tied)
            blocks = quantize_chunks(rows(tensor), format, name, threads=threads)
            writer.add_tensor(name, tensor.shape, format, blocks)
        writer.write()
    return writer.tensor_bytes
