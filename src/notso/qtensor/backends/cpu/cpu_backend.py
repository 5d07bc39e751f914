"""CPU backend. Arrays are numpy arrays, so uploads and downloads copy nothing."""

from __future__ import annotations

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.backends.cpu.huge_pages import HugePageArena
from notso.qtensor.backends.protocol import Array, Host, Numbers
from notso.qtensor.tensor import QTensor
from notso.system.memory import available_memory, huge_pages_available


class CPU:
    """The CPU; all instances share the process's kernels and threads."""

    @classmethod
    def configured(cls, threads: int | None = None) -> CPU:
        """Set the number of threads (None: one per usable physical core).

        The environment variables NOTSO_KERNELS and NOTSO_ATTENTION select the kernels. Raises KernelChoiceError.
        """
        kernel_choice.configure(threads)
        return cls()

    name = "cpu"

    @property
    def kernels(self) -> str:
        return kernel_choice.kernels()

    @property
    def threads(self) -> int:
        return kernel_choice.threads()

    memory = staticmethod(available_memory)

    def weight_bytes(self, tensor: QTensor) -> int:
        return tensor.nbytes

    empty = staticmethod(ops.empty)

    def upload(self, values: Host) -> Array:
        return values

    def write(self, array: Array, values: Numbers) -> None:
        array[:] = values

    def download(self, array: Array) -> Host:
        values: Host = array
        return values

    def weight(self, tensor: QTensor) -> QTensor:
        return tensor

    @property
    def has_weight_arena(self) -> bool:
        return huge_pages_available()

    def weight_arena(self, size_bytes: int, count: int, *, is_requested: bool) -> HugePageArena:
        return HugePageArena(size_bytes, count, packs=is_requested or kernel_choice.packs_by_default())

    key_value_pools = staticmethod(ops.key_value_pools)
    program = ops.Program

    embed_rows = staticmethod(ops.embed_rows)
    gather_rows = staticmethod(ops.gather_rows)
    matmul = staticmethod(ops.matmul)
    matmul_many = staticmethod(ops.matmul_many)
    matmul_add = staticmethod(ops.matmul_add)
    matmul_gated = staticmethod(ops.matmul_gated)
    silu_mul = staticmethod(ops.silu_mul)
    rope_table = staticmethod(ops.rope_table)
    rope = staticmethod(ops.rope)
    store_key_values = staticmethod(ops.store_key_values)
    attention = staticmethod(ops.attention)
