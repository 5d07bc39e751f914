"""Read the tensors of a Hugging Face folder under their GGUF names; reorder the rows of query and key matrices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import QTensor, SafetensorsFile
from notso.smollm3.errors import ModelFileError, quoted
from notso.smollm3.model.weights import TENSOR_NAMES, interleave_rope_rows, module_name
from notso.text_file import read_regular

Floats = npt.NDArray[np.float32]

INDEX_FILE, WHOLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 16 << 20
CHUNK_VALUES = 4 << 20  # approximate number of values that are converted to blocks at a time

# Suffix of the names of RoPE frequency tensors in older folders. These tensors are ignored, because config.json
# determines the frequencies.
_ROPE_FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor and its GGUF name, without `.weight`. `head_rows`: rows per head if they are reordered, else 0."""

    name: str
    source: QTensor
    head_rows: int = 0

    def chunks(self) -> Iterator[Floats]:
        columns = self.source.cols
        step = max(1, CHUNK_VALUES // columns)
        if self.head_rows:
            step = max(step // self.head_rows, 1) * self.head_rows
        for start in range(0, self.source.rows, step):
            rows = self.source.dequantize(start, min(start + step, self.source.rows))
            yield interleave_rope_rows(rows.reshape(-1, columns), self.head_rows) if self.head_rows else rows


class HFFolder:
    """Weights in a folder. Raises ModelFileError, SafetensorsError or OSError."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._tensors: dict[str, QTensor] = {}
        try:
            for path in _files(folder):
                tensors = self._open.enter_context(SafetensorsFile(path)).tensors
                if twice := self._tensors.keys() & tensors.keys():
                    raise ModelFileError(f"the folder has two tensors named {quoted(min(twice))}")
                self._tensors |= tensors
        except BaseException:
            self._open.close()
            raise

    def tensors(self, config: Mapping[str, Any], head_dim: int) -> list[FolderTensor]:
        """Return all tensors in GGUF order. Raises ModelFileError if one is missing or unknown."""
        unused = dict(self._tensors)

        def pop_tensor(name: str, source: str, head_rows: int = 0) -> FolderTensor:
            tensor = unused.pop(f"{source}.weight", None)
            if tensor is None:
                raise ModelFileError(f"the folder has no tensor {source}.weight")
            if head_rows and (len(tensor.shape) != 2 or tensor.rows % head_rows):
                raise ModelFileError(f"the tensor {source}.weight does not consist of heads of {head_rows} rows")
            return FolderTensor(name, tensor, head_rows)

        head, embed = unused.pop("lm_head.weight", None), unused.get("model.embed_tokens.weight")
        is_tied = config.get("tie_word_embeddings", True)
        # If a tied model has no embed_tokens, lm_head is also used as the embedding, as in transformers.
        if embed is None and head is not None and is_tied:
            unused["model.embed_tokens.weight"] = embed = head
        found = [pop_tensor("token_embd", "model.embed_tokens")]
        for layer in range(config["num_hidden_layers"]):
            for role, name in TENSOR_NAMES.items():
                rows = head_dim if role in ("q_proj", "k_proj") else 0
                found.append(pop_tensor(f"blk.{layer}.{name}", f"model.layers.{layer}.{module_name(role)}", rows))
        found.append(pop_tensor("output_norm", "model.norm"))
        if head is not None and not (is_tied and embed is not None and _tensors_equal(head, embed)):
            found.append(FolderTensor("output", head))
        elif head is None and not is_tied:
            raise ModelFileError("the folder has no tensor lm_head.weight")
        unused = {name: tensor for name, tensor in unused.items() if not name.endswith(_ROPE_FREQUENCIES)}
        if unused:
            raise ModelFileError(f"the folder has a tensor that the model does not use: {quoted(min(unused))}")
        return found

    def formats(self) -> set[str]:
        return {tensor.format.name for tensor in self._tensors.values()}

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tensors = {}
        self._open.close()


def _tensors_equal(one: QTensor, other: QTensor) -> bool:
    if one.shape != other.shape:
        return False
    return all(
        np.array_equal(a, b)
        for a, b in zip(FolderTensor("", one).chunks(), FolderTensor("", other).chunks(), strict=True)
    )


def _files(folder: Path) -> list[Path]:
    # If there are both a single file and an index, the single file is used, as in transformers.
    if (folder / WHOLE_FILE).is_symlink() or (folder / WHOLE_FILE).exists():
        return [folder / WHOLE_FILE]
    index = folder / INDEX_FILE
    if not index.exists():
        raise ModelFileError(f"{folder} has neither {WHOLE_FILE} nor {INDEX_FILE}")
    try:
        names = set(json.loads(read_regular(index, MAX_INDEX_BYTES))["weight_map"].values())
    except OSError as error:
        raise ModelFileError(f"{INDEX_FILE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelFileError(f"{INDEX_FILE} lists no files") from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelFileError(f"{INDEX_FILE} lists no files, or files outside its folder")
    return [folder / name for name in sorted(names)]
