"""A folder as Hugging Face has it, made into one GGUF file that this engine and llama.cpp read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from notso.qtensor import Format
from notso.smollm3.config import ARCHITECTURE
from notso.smollm3.conversion.hf_config import Entries, config_entries, read_config
from notso.smollm3.conversion.hf_folder import FolderTensor, HFFolder
from notso.smollm3.conversion.model_file import new_model_file
from notso.smollm3.conversion.packing import packed, require_whole_blocks
from notso.smollm3.errors import InvalidRequestError, ModelFileError
from notso.smollm3.model.quantisation_mix import FILE_TYPES, Q4_K_M, Q5_K_M, format_in
from notso.smollm3.text.tokenizer_json import tokenizer_entries
from notso.smollm3.text.vocabulary import UNUSED

MIXES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", Q4_K_M, Q5_K_M)
"""What can be made. Q4_K_M is the official files' mix."""

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all

_TYPES = {str: "string", int: "uint32"}


def convert(
    folder: Path, out: Path, mix: str = Q4_K_M, progress: Progress | None = None, threads: int | None = None
) -> int:
    """Write `out`; returns the bytes of its tensors. Needs little memory whatever the size: some rows at a time.

    The same folder gives the same file. Raises ModelFileError or SafetensorsError for a folder that is no SmolLM3 this
    engine computes, InvalidRequestError for a mix that is not made, OperandError for numbers that a format cannot hold,
    and OSError where reading or writing fails. If anything fails no file appears.
    """
    if mix not in MIXES:
        raise InvalidRequestError(f"type {mix!r} is not made; choices: {', '.join(MIXES)}", param="type")
    config = read_config(folder)
    entries = _general(folder, mix) | config_entries(config) | _tokenizer(folder, config["vocab_size"])
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

        for tensor in source.tensors(config, head_dim):
            shape = tensor.source.shape
            format = format_in(mix, tensor.name, len(shape), config["num_hidden_layers"])
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


def _tokenizer(folder: Path, vocab: int) -> Entries:
    """Tokens as they are, filled up to the rows of the embedding by names that no text has."""
    found = tokenizer_entries(folder / TOKENIZER_FILE)
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    if len(tokens) > vocab:
        raise ModelFileError(f"{TOKENIZER_FILE} has {len(tokens):,} tokens, the embedding {vocab:,} rows")
    tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab)]
    kinds += [UNUSED] * (vocab - len(kinds))
    if "tokenizer.chat_template" not in found:
        template = _template_of_config(folder)
        if template is None:
            raise ModelFileError(
                f"the folder has no chat template, neither beside {TOKENIZER_FILE} nor in {TOKENIZER_CONFIG}"
            )
        found["tokenizer.chat_template"] = template
    arrays: Entries = {
        "tokenizer.ggml.model": ("gpt2", "string"),
        "tokenizer.ggml.pre": ("smaug-bpe", "string"),
        "tokenizer.ggml.tokens": (tokens, "array of string"),
        "tokenizer.ggml.token_type": (kinds, "array of int32"),
        "tokenizer.ggml.merges": (found["tokenizer.ggml.merges"], "array of string"),
    }
    rest = {key: value for key, value in found.items() if key not in arrays}
    return arrays | {key: (value, _TYPES[type(value)]) for key, value in rest.items()}


def _template_of_config(folder: Path) -> str | None:
    """Where older folders keep it: as text, or in a list of named ones."""
    try:
        given = json.loads((folder / TOKENIZER_CONFIG).read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if isinstance(given, list):
        given = next(
            (each.get("template") for each in given if isinstance(each, dict) and each.get("name") == "default"), None
        )
    return given if isinstance(given, str) else None
