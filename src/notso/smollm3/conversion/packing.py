"""Multithreaded, order-preserving quantization of rows to blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import Format, GGUFFile, GGUFWriter, QTensor
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.model.weights import SmolLM3Weights

Floats = npt.NDArray[np.float32]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def require_whole_blocks(columns: int, format: Format) -> None:
    """Raise InvalidRequestError unless rows consist of whole blocks."""
    if columns % format.block_values:
        raise InvalidRequestError(
            f"rows of {columns} values are not a multiple of {format}'s block size; F16, BF16 and F32 accept any",
            param="type",
        )


def packed(
    rows: Iterable[Floats], format: Format, name: str, importance: Floats | None = None, threads: int | None = None
) -> Iterator[Bytes]:
    """Yield the packed bytes of each chunk, few at a time. Raises OperandError as `QTensor`."""
    count = threads or os.cpu_count() or 1
    waiting: deque[Future[Bytes]] = deque()
    with ThreadPoolExecutor(count, "notso-packing") as pool:
        try:
            for piece in rows:
                waiting.append(pool.submit(lambda part: QTensor.quantise(part, format, name, importance).data, piece))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def new_model_file(out: Path) -> Iterator[GGUFWriter]:
    """Yield a writer, then validate and publish the file. Raises ModelFileError or OSError."""
    unchecked = out.with_name(f".{out.name}.{os.getpid()}.new")
    writer = GGUFWriter(unchecked)
    try:
        yield writer
        writer.write()
        with GGUFFile.open(unchecked) as made:  # validates as any reader does
            SmolLM3Weights.from_tensors(made.tensors, SmolLM3Config.from_metadata(made.metadata))
        unchecked.replace(out)
    finally:
        unchecked.unlink(missing_ok=True)
