"""Convert a Hugging Face folder to one GGUF file that this engine and llama.cpp read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from notso.qtensor import Format, NotsoError, name_file
from notso.smollm3.config import ARCHITECTURE
from notso.smollm3.conversion.hf_config import CONFIG, Entries, config_entries, end_tokens, read_object
from notso.smollm3.conversion.hf_folder import FolderTensor, HFFolder
from notso.smollm3.conversion.hf_tokenizer import folder_tokenizer
from notso.smollm3.conversion.packing import new_model_file, packed, require_whole_blocks
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.model.quantisation_mix import FILE_TYPES, Q4_K_M, Q5_K_M, format_in

# Supported output types. Q4_K_M is the mix of the official files.
MIXES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", Q4_K_M, Q5_K_M)

# Incremented whenever the same folder yields a different file, so that cached conversions are redone.
VERSION = 2

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


def convert(
    folder: Path, out: Path, mix: str = Q4_K_M, progress: Progress | None = None, threads: int | None = None
) -> int:
    """Convert a folder to `out`, deterministically and in little memory; return the bytes of its tensors.

    Raises ModelFileError or SafetensorsError for an unsupported folder, InvalidRequestError for an unknown mix,
    OperandError for unrepresentable values, OSError. No file appears on failure.
    """
    if mix not in MIXES:
        raise InvalidRequestError(f"type {mix!r} is not supported; choices: {', '.join(MIXES)}", param="type")
    try:
        return _convert(folder, out, mix, progress, threads)
    except NotsoError as error:
        name_file(error, folder)
        raise


def _convert(folder: Path, out: Path, mix: str, progress: Progress | None, threads: int | None) -> int:
    config = read_object(folder, CONFIG)
    entries = _general(folder, mix) | config_entries(config)
    entries |= folder_tokenizer(folder, config["vocab_size"], end_tokens(folder, config))
    head_dim = entries[f"{ARCHITECTURE}.rope.dimension_count"][0]
    with HFFolder(folder) as source, new_model_file(out) as writer:
        for key, (value, type_name) in entries.items():
            writer.add(key, value, type_name)
        written = 0

        def blocks(tensor: FolderTensor, format: Format) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
            nonlocal written
            for data in packed(tensor.chunks(), format, tensor.name, threads=threads):
                yield data
                written += data.size
                if progress is not None:
                    progress(written, writer.tensor_bytes)

        tensors = source.tensors(config, head_dim)
        is_tied = all(tensor.name != "output" for tensor in tensors)
        for tensor in tensors:
            shape = tensor.source.shape
            format = format_in(mix, tensor.name, len(shape), config["num_hidden_layers"], is_tied=is_tied)
            require_whole_blocks(shape[-1], format)
            writer.add_tensor(f"{tensor.name}.weight", shape, format, blocks(tensor, format))
    return writer.tensor_bytes


def _general(folder: Path, mix: str) -> Entries:
    return {
        "general.architecture": (ARCHITECTURE, "string"),
        "general.type": ("model", "string"),
        "general.name": (folder.resolve().name or "SmolLM3", "string"),
        "general.quantization_version": (2, "uint32"),
        "general.file_type": (FILE_TYPES[mix], "uint32"),
    }
