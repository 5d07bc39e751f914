"""
Kernels over quantised tensors. Use notso.qtensor.ops, which explains errors before they arise here.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def cpu_features() -> list[str]:
    """Instruction sets usable here, as names."""

def known_kernels() -> list[str]:
    """Kernel families compiled in, best first."""

def available_kernels() -> list[str]:
    """Kernel families this CPU runs, best first."""

def kernels() -> str:
    """The kernel family in force."""

def use_kernels(name: str) -> None:
    """Puts a family in force; ValueError lists the choices."""

def thread_count() -> int:
    """Threads that share each operation."""

def set_thread_count(threads: int) -> None:
    """Replaces the thread pool; waits for running work."""

class Program:
    """Steps recorded once and replayed in one call without Python's lock."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def begin(self) -> None:
        """
        Operations called from this thread are recorded from here on instead of run.
        """

    def end(self) -> None:
        """Ends the recording."""

    def run(self) -> None:
        """
        Runs every step in order. ValueError where an array holds a row, position or block out of range.
        """

def embed_rows(arg0: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], arg1: int, arg2: int, arg3: int, arg4: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg5: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def gather_rows(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def rms_norm(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg2: float, arg3: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def matmul(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]], arg2: Sequence[int], arg3: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]], /) -> None: ...

def rope(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], arg1: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg3: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg4: bool, /) -> None: ...

def store_key_values(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg3: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg4: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg5: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None, None), order='C', device='cpu')], arg6: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None, None), order='C', device='cpu')], /) -> None: ...

def attention(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], arg3: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg4: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None, None), order='C', device='cpu')], arg5: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None, None), order='C', device='cpu')], arg6: float, arg7: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], /) -> None: ...

def silu_mul(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def add(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def softmax(arg: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def argmax(arg0: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], arg1: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], /) -> None: ...

def rope_table(arg0: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], arg1: float, arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], arg3: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...

def dequantise(arg0: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], arg1: int, arg2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], /) -> None: ...
