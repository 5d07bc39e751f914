"""
Kernels over quantized tensors. Use the ops of the backend, which explain errors before they arise here.
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
    Architectures this build has machine code for, as numbers in a line; empty: it has none.
    """

def cuda_laid_bytes(format: int, rows: int, k: int) -> int:
    """Bytes of a weight on the device."""

class CudaDevice:
    """
    One GPU. CudaUnavailable, CudaOutOfMemory or CudaLost come from every method.
    """

    def __init__(self, library: str, number: int, code: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> int: ...

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

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
    """Instruction sets usable here, as names."""

def known_kernels() -> list[str]:
    """Kernel families compiled in, best first."""

def available_kernels() -> list[str]:
    """Kernel families this CPU runs, best first."""

def kernels() -> str:
    """The kernel family in force."""

def use_kernels(name: str) -> None:
    """Puts a family in force; ValueError lists the choices."""

def use_attention(variant: str) -> None:
    """auto, vectors or tiles; ValueError lists the choices."""

def attention_variant() -> str:
    """How many queries read a cache of bytes: by vectors or by tiles."""

def end_on_bus_errors(exit_code: int, line: str) -> None:
    """
    A mapped file that vanishes ends the process with this code and this line on stderr.
    """

def thread_count() -> int:
    """Threads that share each operation."""

def work_shares() -> list[int]:
    """
    Work items that each thread has done since the pool was made; waits for running work.
    """

def set_thread_count(threads: int) -> None:
    """Replaces the thread pool; waits for running work."""

def read_memory(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], places: int = 1) -> int:
    """
    Reads every whole cache line once, on all threads, each in so many places at a time; the exclusive or of their 64-bit words.
    """

def multiply_bytes(products: int) -> int:
    """
    Makes at least so many byte products on all threads, from registers; how many it made.
    """

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
    """
    Whether the family in force has kernels for packed weights of a format.
    """

def packs_by_default() -> bool:
    """Whether packed weights are slower nowhere in the family in force."""

def packed_bytes(format: int, rows: int, k: int, slab_stride: int) -> int:
    """
    Bytes of a packed weight with so many from slab to slab; of 64 rows at the most, those of a slab.
    """

def pack_weight(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], format: int, rows: int, k: int, slab_stride: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Packs a weight into slabs that begin slab_stride bytes after one another; leaves what lies between.
    """

def dequantize(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], format: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...
