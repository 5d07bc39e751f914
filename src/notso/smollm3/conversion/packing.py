"""Multithreaded, order-preserving quantization of rows to blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import Format, QTensor
from notso.smollm3.errors import InvalidRequestError

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
