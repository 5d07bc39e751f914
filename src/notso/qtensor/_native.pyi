"""
Kernels for quantized tensors. Use the ops of the backend, which report errors in more detail.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class CudaUnavailable(RuntimeError):
    pass

class CudaOutOfMemory(RuntimeError):
    pass

class CudaLost(RuntimeError):
    pass

def cuda_architectures() -> str:
    """
    Return the architectures with machine code in this build, separated by spaces; empty if there are none.
    """

def cuda_laid_bytes(format: int, rows: int, k: int) -> int:
    """Return the size in bytes of a weight in device memory."""

class CudaDevice:
    """
    A GPU. Every method may raise CudaUnavailable, CudaOutOfMemory or CudaLost.
    """

    def __init__(self, library: str, number: int, code: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> int: ...

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory."""

    def allocate(self, size: int, zeroed: bool) -> int: ...

    def free(self, address: int) -> None: ...

    def upload(self, to: int, source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def download(self, to: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], source: int) -> None: ...

    def copy(self, to: int, source: int, size: int) -> None: ...

    def wait(self) -> None: ...

    def upload_weight(self, format: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: int, k: int, to: int) -> None: ...

    def capture_begin(self) -> None: ...

    def capture_end(self) -> int: ...

    def capture_drop(self) -> None: ...

    def run_graph(self, graph: int) -> None: ...

    def free_graph(self, graph: int) -> None: ...

    @property
    def scratch_moves(self) -> int: ...

    def embed_rows(self, weight: tuple[int, int, int, int], ids: int, rows: int, out: int) -> None: ...

    def gather_rows(self, x: int, ids: int, rows: int, width: int, out: int) -> None: ...

    def matmul(self, x: int, m: int, k: int, each: Sequence[tuple[tuple[int, int, int, int], int]], norm: int, eps: float, join: int) -> None: ...

    def rope_table(self, frequencies: int, pairs: int, positions: int, rows: int, factor: float, cosine: int, sine: int) -> None: ...

    def rope(self, x: int, rows: int, heads: int, dim: int, positions: int, cosine: int, sine: int, adjacent: bool) -> None: ...

    def store_key_values(self, k: int, v: int, places: tuple[int, int, int, int, int, int], pool: tuple[int, int, int, int], window: tuple[int, int, int, int]) -> None: ...

    def attention(self, q: int, heads: int, places: tuple[int, int, int, int, int, int], pool: tuple[int, int, int, int], window: tuple[int, int, int, int], scale: float, tiles: int, out: int) -> None: ...

    def store_and_attend(self, of_keys: tuple[int, int, int], k: int, v: int, stored: tuple[int, int, int, int, int, int], of_queries: tuple[int, int, int], q: int, heads: int, attended: tuple[int, int, int, int, int, int], pool: tuple[int, int, int, int], window: tuple[int, int, int, int], scale: float, tiles: int, out: int) -> None: ...

    def silu_mul(self, gate: int, up: int, count: int, out: int) -> None: ...

    def argmax(self, x: int, rows: int, width: int, out: int) -> None: ...

    def softmax(self, x: int, rows: int, width: int) -> None: ...

def cpu_features() -> list[str]:
    """
    Return the instruction sets that the CPU and the operating system support.
    """

def known_kernels() -> list[str]:
    """Return the kernel families in this build, best first."""

def available_kernels() -> list[str]:
    """Return the kernel families that this CPU supports, best first."""

def kernels() -> str:
    """Return the current kernel family."""

def use_kernels(name: str) -> None:
    """Select a kernel family. Raises ValueError, which lists the choices."""

def use_attention(variant: str) -> None:
    """Select auto, vectors or tiles. Raises ValueError if unsupported."""

def attention_variant() -> str:
    """Return the method of attention for many queries: vectors or tiles."""

def end_on_bus_errors(exit_code: int, line: str) -> None:
    """
    If a mapped file can no longer be read, print the line to stderr and exit with the code.
    """

def thread_count() -> int:
    """Return the number of threads that share each operation."""

def work_shares() -> list[int]:
    """
    Return the number of work items done by each thread since the pool was created. Waits for running work.
    """

def set_thread_count(threads: int) -> None:
    """Replace the thread pool. Waits for running work."""

def read_memory(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], places: int = 1) -> int:
    """
    Read each whole cache line once, on all threads; each thread reads from `places` positions alternately. Return the exclusive or of all 64-bit words.
    """

def multiply_bytes(products: int) -> int:
    """
    Compute at least this many byte products on all threads, with operands in registers. Return their number.
    """

class Program:
    """Recorded steps, replayed in one call without the GIL."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def begin(self) -> None:
        """Record the operations called in this thread, instead of running them."""

    def end(self) -> None:
        """Stop recording."""

    def run(self) -> None:
        """
        Run the steps in order. Raises ValueError if an array contains a row, position or block out of range.
        """

def embed_rows(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], format: int, rows: int, k: int, slab_stride: int, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def gather_rows(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def rms_norm(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def matmul(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], data: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]], formats: Sequence[int], slab_strides: Sequence[int], outs: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]], norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, eps: float, combine: int) -> None: ...

def rope(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cosine: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sine: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], adjacent: bool) -> None: ...

def store_key_values(k: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], v: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], sequences: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], pool: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, None), order='C', device='cpu')], format: int, window_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, window: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, None), order='C', device='cpu')] | None) -> None: ...

def attention(q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], sequences: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], pool: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, None), order='C', device='cpu')], format: int, kv_heads: int, window_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, window: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None, None), order='C', device='cpu')] | None, scale: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None: ...

def silu_mul(gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def add(a: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], b: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def softmax(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def argmax(x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

def rope_table(frequency: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], factor: float, cosine: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sine: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

def is_packed(format: int) -> bool:
    """Return whether the current kernels support packed weights of a format."""

def packs_by_default() -> bool:
    """
    Return whether packed weights are never slower with the current kernels.
    """

def packed_bytes(format: int, rows: int, k: int, slab_stride: int) -> int:
    """
    Return the size of a packed weight whose slabs begin slab_stride bytes apart; with up to 64 rows, of one slab.
    """

def pack_weight(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], format: int, rows: int, k: int, slab_stride: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Pack a weight into slabs that begin slab_stride bytes apart. Bytes between slabs are not written.
    """

def dequantize(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], format: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...
