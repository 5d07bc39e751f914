"""Copies of GGUF files with all tensors in F32: trained weights without quantized arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from notso.qtensor.formats import F32
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter


def write_dequantized(source: Path, out: Path) -> Path:
    """Write a copy of `source` to `out` with the same metadata and with the dequantized values of its blocks in F32."""
    with GGUFFile.open(source) as file, GGUFWriter(out, durable=False) as writer:
        for key, value in file.metadata.items():
            writer.add(key, value, file.metadata_types[key])
        for tensor in file.tensors.values():
            values = np.ascontiguousarray(tensor.dequantize(), "<f4")
            writer.add_tensor(tensor.name, tensor.shape, F32, values.reshape(-1).view(np.uint8))
    return out
