"""Convert a Hugging Face folder to a GGUF file for this engine and llama.cpp.

Rows are quantized in several threads and written in order. If a folder is used as a model, `cached_conversion` converts
it once and caches the file.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import Format, GGUFFile, GGUFWriter, NotsoError, QTensor, set_error_path
from notso.smollm3.config import ARCHITECTURE, SmolLM3Config
from notso.smollm3.conversion.hf_config import CONFIG, Entries, config_entries, end_tokens, read_object
from notso.smollm3.conversion.hf_folder import HFFolder
from notso.smollm3.conversion.hf_tokenizer import folder_tokenizer
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.hub.registry import notso_cache
from notso.smollm3.model.weights import FILE_TYPES, Q4_K_M, Q5_K_M, SmolLM3Weights, format_in

Floats = npt.NDArray[np.float32]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def tensor_format(mix: str, name: str, shape: Sequence[int], layers: int, *, is_tied: bool) -> Format:
    """Return a tensor's format in a file of type `mix`. Raises InvalidRequestError for incomplete blocks."""
    format = format_in(mix, name.removesuffix(".weight"), len(shape), layers, is_tied=is_tied)
    columns = shape[-1]
    if columns % format.block_values:
        raise InvalidRequestError(
            f"row length {columns} is not a multiple of {format}'s block size; F16, BF16 and F32 accept any length",
            param="type",
        )
    return format


def quantize_chunks(
    rows: Iterable[Floats], format: Format, name: str, importance: Floats | None = None, threads: int | None = None
) -> Iterator[Bytes]:
    """Yield each chunk of `rows` as quantized blocks. Raises OperandError."""
    count = threads or os.cpu_count() or 1
    waiting: deque[Future[Bytes]] = deque()
    with ThreadPoolExecutor(count, "notso-packing") as pool:
        try:
            for piece in rows:
                waiting.append(pool.submit(lambda part: QTensor.quantize(part, format, name, importance).data, piece))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


Progress = Callable[[int, int], None]  # bytes written, total bytes


@contextmanager
def new_model_file(out: Path, progress: Progress) -> Iterator[GGUFWriter]:
    """Yield a writer; then write and validate the file, and move it to `out`. Raises ModelFileError or OSError."""
    # The name is unique, because another thread may write a file to the same path.
    unchecked = out.with_name(f".{out.name[:50]}.{uuid.uuid4().hex}.new")
    writer = GGUFWriter(unchecked, progress=progress)
    try:
        yield writer
        writer.write()
        with GGUFFile.open(unchecked) as made:
            SmolLM3Weights.from_tensors(made.tensors, SmolLM3Config.from_metadata(made.metadata))
        unchecked.replace(out)
    finally:
        unchecked.unlink(missing_ok=True)


# Supported output types. Files of type Q4_K_M or Q5_K_M contain several formats.
MIXES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", Q4_K_M, Q5_K_M)

# Increment this when a code change alters the converted files, so that cached conversions are not used any more.
VERSION = 2


def convert(
    folder: Path,
    out: Path,
    mix: str = Q4_K_M,
    progress: Progress = lambda done, total: None,
    threads: int | None = None,
) -> int:
    """Convert a folder to `out`, reproducibly; return the size of the written tensors in bytes.

    Raises ModelFileError or SafetensorsError for an unsupported folder, InvalidRequestError for an unusable `mix`,
    OperandError for values that a format cannot represent, or OSError. No file is created on error.
    """
    if mix not in MIXES:
        raise InvalidRequestError(f"type {mix!r} is not supported; choices: {', '.join(MIXES)}", param="type")
    try:
        return _convert(folder, out, mix, progress, threads)
    except NotsoError as error:
        set_error_path(error, folder)
        raise


def _convert(folder: Path, out: Path, mix: str, progress: Progress, threads: int | None) -> int:
    config = read_object(folder, CONFIG)
    entries = general_entries(folder.resolve().name or "SmolLM3", mix) | config_entries(config)
    entries |= folder_tokenizer(folder, config["vocab_size"], end_tokens(folder, config))
    head_dim = entries[f"{ARCHITECTURE}.rope.dimension_count"][0]
    with HFFolder(folder) as source, new_model_file(out, progress) as writer:
        for key, (value, type_name) in entries.items():
            writer.add(key, value, type_name)
        tensors = source.tensors(config, head_dim)
        is_tied = all(tensor.name != "output" for tensor in tensors)
        for tensor in tensors:
            shape = tensor.source.shape
            format = tensor_format(mix, tensor.name, shape, config["num_hidden_layers"], is_tied=is_tied)
            blocks = quantize_chunks(tensor.chunks(), format, tensor.name, threads=threads)
            writer.add_tensor(f"{tensor.name}.weight", shape, format, blocks)
    return writer.tensor_bytes


_REPLACED = ("general.file_type", "general.quantization_version", "quantize.imatrix.")


def copy_metadata(file: GGUFFile, writer: GGUFWriter, mix: str) -> None:
    """Copy metadata, but replace the entries that describe the quantization."""
    for key, value in file.metadata.items():
        if not key.startswith(_REPLACED):
            writer.add(key, value, file.metadata_types[key])
    writer.add("general.quantization_version", 2, "uint32")
    writer.add("general.file_type", FILE_TYPES[mix], "uint32")


def general_entries(name: str, mix: str) -> Entries:
    """Return the `general.*` entries of a model of type `mix`."""
    return {
        "general.architecture": (ARCHITECTURE, "string"),
        "general.type": ("model", "string"),
        "general.name": (name, "string"),
        "general.quantization_version": (2, "uint32"),
        "general.file_type": (FILE_TYPES[mix], "uint32"),
    }


MIX = "Q4_K_M"  # output type of cached conversions

# A function that is called with the folder and the output file before a conversion. It returns a context manager that
# yields a progress callback.
Announce = Callable[[Path, Path], AbstractContextManager[Progress]]


def cached_conversion(
    folder: Path, announce: Announce = lambda folder, target: nullcontext(lambda done, total: None)
) -> Path:
    """Return a folder's cached GGUF file; convert a new or changed folder. Raises the same errors as `convert`."""
    target = _target(folder.resolve())
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with announce(folder, target) as report:
            convert(folder, target, MIX, report)
        _delete_outdated(target)
    return target


def _target(folder: Path) -> Path:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    # The name depends on the files and on VERSION, so a changed folder is converted again.
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    keys = (str(folder), (VERSION, states))
    where, what = (hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in keys)
    name = os.fsencode(folder.name)[:200].decode(errors="ignore")  # a file name can have at most 255 bytes
    return notso_cache() / "converted" / f"{name}-{where}-{what}-{MIX}.gguf"


def _delete_outdated(target: Path) -> None:
    # Deletes the cached conversions of earlier versions of the folder.
    prefix = target.name.removesuffix(f"-{MIX}.gguf").rpartition("-")[0]
    for older in target.parent.glob("*.gguf"):
        if older != target and older.name.startswith(f"{prefix}-"):
            older.unlink(missing_ok=True)
