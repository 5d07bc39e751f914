"""Create blocks and files of a block type with llama.cpp's quantizer.

    python llama_cpp_types.py blocks OUT.npz TYPE ...
    python llama_cpp_types.py file MODEL.gguf OUT.gguf TYPE

Requires a Python with `llama_cpp`; it imports nothing from notso. MODEL is in F32. TYPE is a name of GGUF, and all
matrices are quantized to it. For types that require an importance matrix, all columns of a file have the same
importance; the columns of blocks have different ones.

OUT.npz contains source (4, 256) float32 and importance (256,), which are the same for all types. For each type, it
contains NAME.blocks (4, bytes) uint8, and NAME.values (4, 256) float32 as dequantized by llama.cpp.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS = 4, 256
FILE_TYPES = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}
"""Block types whose file type has another name in llama.cpp."""

UNNAMED = {"TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39}
"""Numbers of types for which the package may not have a name."""


class Traits(ctypes.Structure):
    """The first fields of ggml_type_traits."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block_values", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


def ggml() -> Any:
    """Return llama_cpp's shared library with the quantizers."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))
    library.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    return library


def type_number(c: Any, name: str) -> int:
    return UNNAMED.get(name) or int(getattr(c, f"GGML_TYPE_{name}"))


def blocks(out: Path, names: list[str]) -> None:
    import llama_cpp

    library, rng = ggml(), np.random.default_rng(20)
    source = (rng.standard_normal((ROWS, COLUMNS)) * np.array([[0.02], [0.5], [3.0], [1e-3]])).astype(np.float32)
    importance = rng.uniform(0.1, 2.0, COLUMNS).astype(np.float32)
    arrays: dict[str, np.ndarray] = {"source": source, "importance": importance}
    for name in names:
        number = type_number(llama_cpp, name)
        traits = library.ggml_get_type_traits(number).contents
        packed = np.zeros((ROWS, COLUMNS // traits.block_values * traits.block_bytes), np.uint8)
        written = library.ggml_quantize_chunk(
            *(number, source.ctypes.data, packed.ctypes.data, 0, ROWS, COLUMNS, importance.ctypes.data)
        )
        if written != packed.nbytes:
            raise SystemExit(f"{name}: {written} bytes, not {packed.nbytes}")
        values = np.zeros((ROWS, COLUMNS), np.float32)
        traits.to_float(packed.ctypes.data, values.ctypes.data, values.size)
        arrays |= {f"{name}.blocks": packed, f"{name}.values": values}
    np.savez_compressed(out, **arrays)


def file(model: Path, out: Path, name: str) -> None:
    import llama_cpp as c

    params = c.llama_model_quantize_default_params()
    params.ftype = getattr(c, f"LLAMA_FTYPE_MOSTLY_{FILE_TYPES.get(name, name)}")
    params.output_tensor_type = params.token_embedding_type = type_number(c, name)
    params.pure, params.nthread = True, 1
    kept = []  # keeps the objects that entries point to alive
    entries = []
    for tensor, columns in matrices(c, model):
        ones = (ctypes.c_float * columns)(*[1.0] * columns)
        entry = c.llama_model_imatrix_data(
            name=tensor.encode(), data=ctypes.cast(ones, ctypes.POINTER(ctypes.c_float)), size=columns
        )
        kept.append(ones)
        entries.append(entry)
    entries.append(c.llama_model_imatrix_data())  # terminates the array
    params.imatrix = (c.llama_model_imatrix_data * len(entries))(*entries)
    if c.llama_model_quantize(str(model).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp made no {name} of {model.name}")


def matrices(c: Any, model: Path) -> list[tuple[str, int]]:
    """Return names and numbers of columns of a SmolLM3's matrices."""
    params = c.llama_model_default_params()
    params.vocab_only = True
    loaded = c.llama_model_load_from_file(str(model).encode(), params)
    if not loaded:
        raise SystemExit(f"llama.cpp cannot read {model.name}")

    def entry(key: str) -> int:
        text = ctypes.create_string_buffer(64)
        c.llama_model_meta_val_str(loaded, f"smollm3.{key}".encode(), text, len(text))
        return int(text.value)

    hidden, ffn, layers = entry("embedding_length"), entry("feed_forward_length"), entry("block_count")
    c.llama_model_free(loaded)
    roles = {"attn_q": hidden, "attn_k": hidden, "attn_v": hidden, "attn_output": hidden}
    roles |= {"ffn_gate": hidden, "ffn_up": hidden, "ffn_down": ffn}
    named = [(f"blk.{i}.{role}.weight", columns) for i in range(layers) for role, columns in roles.items()]
    return [("token_embd.weight", hidden), ("output.weight", hidden), *named]


def main() -> None:
    parser = argparse.ArgumentParser(description="Blocks and files of a type, by llama.cpp's quantizer.")
    commands = parser.add_subparsers(dest="what", required=True)
    command = commands.add_parser("blocks")
    command.add_argument("out", type=Path)
    command.add_argument("types", nargs="+")
    command = commands.add_parser("file")
    command.add_argument("model", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("type")
    options = parser.parse_args()
    if options.what == "blocks":
        blocks(options.out, options.types)
    else:
        file(options.model, options.out, options.type)


if __name__ == "__main__":
    main()
