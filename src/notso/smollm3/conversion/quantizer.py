"""Quantize a float model to block formats. The output types have the same names as in llama.cpp."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from notso.qtensor import FORMATS_BY_NAME, GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.conversion.converter import convert, copy_metadata, new_model_file, quantize_chunks, tensor_format
from notso.smollm3.conversion.hf_folder import FolderTensor, HFFolder
from notso.smollm3.conversion.importance import importance
from notso.smollm3.errors import InvalidRequestError, ModelFileError, quoted
from notso.smollm3.model.weights import Q4_K_M, Q5_K_M, SmolLM3Weights

# Supported output types. `convert` supports further types.
MIXES = (Q4_K_M, Q5_K_M, "Q6_K", "Q8_0")

Progress = Callable[[str, int, int], None]  # activity, amount done, total amount


def quantize(
    source: Path,
    out: Path,
    mix: str = Q4_K_M,
    text: tuple[str, str] | None = None,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> int:
    """Quantize a float GGUF file or Hugging Face folder to `out`, reproducibly; return the tensors' size in bytes.

    text: name and content of a text on which to measure importance (see importance.py).

    Raises the same errors as `convert`, GGUFError, KernelChoiceError for unusable `threads`, or InvalidRequestError if
    the text is too short. No file is created on error.
    """
    if mix not in MIXES:
        raise InvalidRequestError(f"type {quoted(mix)} is not supported; choices: {', '.join(MIXES)}", param="type")
    if not source.is_dir():
        return _quantize_file(source, out, mix, text, threads, progress)
    if text is None:
        return convert(source, out, mix, partial(progress, "writing"), threads)
    # Importance can be measured only with a GGUF file, so the folder is first converted to a temporary one.
    floats = out.with_name(f".{out.name[:50]}.{uuid.uuid4().hex}.floats")
    try:
        convert(source, floats, _common_format(source), partial(progress, "converting"), threads)
        return _quantize_file(floats, out, mix, text, threads, progress)
    finally:
        floats.unlink(missing_ok=True)


def _quantize_file(
    source: Path, out: Path, mix: str, text: tuple[str, str] | None, threads: int | None, progress: Progress
) -> int:
    with GGUFFile.open(source) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        SmolLM3Weights.from_tensors(file.tensors, config)
        for tensor in file.tensors.values():
            if not tensor.format.is_float:
                raise ModelFileError(
                    f"{source.name} is already quantized: {quoted(tensor.name)} is {tensor.format}. "
                    "The lost precision cannot be recovered; use the original file (F16, BF16 or F32) instead"
                )
        is_tied = "output.weight" not in file.tensors
        layers = config.num_hidden_layers
        formats = {
            name: tensor_format(mix, name, tensor.shape, layers, is_tied=is_tied)
            for name, tensor in file.tensors.items()
        }
        measured = None
        if text is not None:
            measured = importance(file, text[1], threads, partial(progress, "measuring"))
        with new_model_file(out, partial(progress, "writing")) as writer:
            copy_metadata(file, writer, mix)
            if text is not None and measured is not None:  # the keys that llama.cpp writes
                writer.add("quantize.imatrix.dataset", text[0], "string")
                writer.add("quantize.imatrix.entries_count", len(measured.of), "uint32")
                writer.add("quantize.imatrix.chunks_count", measured.windows, "uint32")
            for name, tensor in file.tensors.items():
                rows = FolderTensor(name, tensor).chunks()
                columns = measured.of.get(name) if measured is not None else None
                blocks = quantize_chunks(rows, formats[name], name, columns, threads)
                writer.add_tensor(name, tensor.shape, formats[name], blocks)
    return writer.tensor_bytes


def _common_format(folder: Path) -> str:
    with HFFolder(folder) as found:
        formats = found.formats()
    return formats.pop() if len(formats) == 1 and formats <= FORMATS_BY_NAME.keys() else "F32"
