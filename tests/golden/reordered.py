"""The demo model with reordered channels: the same function, with values that blocks do not represent exactly.

The original's values were quantized before, so quantizing them again would lose nothing and hide errors of a quantizer.
After reordering, each block contains values of many old blocks with different scales.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from notso.qtensor.formats import F32
from notso.qtensor.gguf import GGUFFile
from notso.qtensor.gguf_writer import GGUFWriter

READS_HIDDEN = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


def write_reordered(source: Path, out: Path) -> Path:
    """Write `source` to `out` in F32, with the channels of the residual stream, of the feed-forward layer and of each
    value head reordered consistently in all matrices that use them."""
    with GGUFFile.open(source) as file, GGUFWriter(out, durable=False) as writer:
        facts = file.metadata
        hidden, ffn, dim = (
            facts[f"smollm3.{key}"] for key in ("embedding_length", "feed_forward_length", "rope.dimension_count")
        )
        orders = {size: np.random.PCG64([3, size]).random_raw(size).argsort() for size in (hidden, ffn, dim)}

        def heads(channels: int) -> np.ndarray:
            return (np.arange(0, channels, dim)[:, None] + orders[dim]).reshape(-1)

        for key, value in facts.items():
            writer.add(key, value, file.metadata_types[key])
        for tensor in file.tensors.values():
            values = tensor.dequantize().reshape(tensor.shape)
            role = tensor.name.split(".")[-2]
            if role in READS_HIDDEN or role in ("token_embd", "attn_norm", "ffn_norm", "output_norm"):
                values = values[..., orders[hidden]]
            if role in ("ffn_gate", "ffn_up"):
                values = values[orders[ffn]]
            if role == "ffn_down":
                values = values[orders[hidden]][:, orders[ffn]]
            if role == "attn_v":
                values = values[heads(len(values))]
            if role == "attn_output":
                values = values[orders[hidden]][:, heads(values.shape[1])]
            content = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)
            writer.add_tensor(tensor.name, tensor.shape, F32, content)
    return out
