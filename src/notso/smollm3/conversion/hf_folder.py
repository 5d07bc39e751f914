"""The tensors of a folder as Hugging Face has it, by the names they have in a GGUF file.

Rows of queries and keys change their order: there a rotation turns numbers half a head apart, here neighbours. So row
128h + 2i of a GGUF file is row 128h + i of the folder's, and row 128h + 2i + 1 is row 128h + 64 + i.
"""

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

Floats = npt.NDArray[np.float32]

INDEX_FILE, WHOLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 16 << 20
CHUNK_VALUES = 4 << 20
"""Numbers made into blocks at a time, about."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor under its GGUF name, without `.weight`. head_rows: of how many rows a head is whose rows change their
    order; 0: none do."""

    name: str
    source: QTensor
    head_rows: int = 0

    def chunks(self) -> Iterator[Floats]:
        """All numbers, in the file's order, some rows at a time (n, columns) float32."""
        columns = self.source.cols
        step = max(1, CHUNK_VALUES // columns)
        if self.head_rows:
            step = max(step // self.head_rows, 1) * self.head_rows
        for start in range(0, self.source.rows, step):
            rows = self.source.dequantise(start, min(start + step, self.source.rows))
            if self.head_rows:
                halves = rows.reshape(-1, 2, self.head_rows // 2, columns)
                rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1, columns)
            yield rows


class HFFolder:
    """The weights of a folder. Raises ModelFileError, SafetensorsError or OSError."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._tensors: dict[str, QTensor] = {}
        try:
            for path in _files(folder):
                tensors = self._open.enter_context(SafetensorsFile(path)).tensors
                if twice := self._tensors.keys() & tensors.keys():
                    raise ModelFileError(f"the folder holds {quoted(min(twice))} twice")
                self._tensors |= tensors
        except BaseException:
            self._open.close()
            raise

    def tensors(self, config: Mapping[str, Any], head_dim: int) -> list[FolderTensor]:
        """Every tensor in the order of a GGUF file. Raises ModelFileError for one that is missing or unknown."""
        left = dict(self._tensors)

        def take(name: str, source: str, head_rows: int = 0) -> FolderTensor:
            tensor = left.pop(f"{source}.weight", None)
            if tensor is None:
                raise ModelFileError(f"the folder lacks the tensor {source}.weight")
            if head_rows and (len(tensor.shape) != 2 or tensor.rows % head_rows):
                raise ModelFileError(f"the tensor {source}.weight has no heads of {head_rows} rows")
            return FolderTensor(name, tensor, head_rows)

        found = [take("token_embd", "model.embed_tokens")]
        for layer in range(config["num_hidden_layers"]):
            for role, module in _LAYER.items():
                rows = head_dim if role in ("attn_q", "attn_k") else 0
                found.append(take(f"blk.{layer}.{role}", f"model.layers.{layer}.{module}", rows))
        found.append(take("output_norm", "model.norm"))
        if config.get("tie_word_embeddings", True):
            left.pop("lm_head.weight", None)  # a copy of the embedding, which some write
        else:
            found.append(take("output", "lm_head"))
        if left:
            raise ModelFileError(f"the folder holds a tensor that this model does not use: {quoted(min(left))}")
        return found

    def formats(self) -> set[str]:
        """The names of the formats that its tensors are in."""
        return {tensor.format.name for tensor in self._tensors.values()}

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tensors = {}
        self._open.close()


def _files(folder: Path) -> list[Path]:
    """The one file of weights, or those of the index, which must lie in the folder itself."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WHOLE_FILE).is_file():
            raise ModelFileError(f"{folder} holds neither {WHOLE_FILE} nor {INDEX_FILE}")
        return [folder / WHOLE_FILE]
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ModelFileError(f"{INDEX_FILE} has more than {MAX_INDEX_BYTES >> 20} MiB")
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelFileError(f"{INDEX_FILE} names no files") from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelFileError(f"{INDEX_FILE} names files outside its folder")
    return [folder / name for name in sorted(names)]
