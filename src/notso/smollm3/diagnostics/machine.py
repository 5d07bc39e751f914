"""Machine description, memory use and CPU steal time, for the interpretation of measurements."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import kernel_choice, process_memory, zeroed
from notso.system import processors
from notso.system.memory import physical_memory

Bytes = npt.NDArray[np.uint8]


def describe_machine() -> dict[str, Any]:
    """Return date, CPU, memory, kernel and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "features": kernel_choice.cpu_features(),
        "cores": processors.usable_processors(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "system": processors.system_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_name() -> str:
    """Return the processor's model name, or its architecture."""
    return processors.name() or platform.machine()


def probe_buffer(size_bytes: int) -> Bytes:
    """Return a resident uint8 buffer."""
    buffer = zeroed(size_bytes)
    # Every page is written so that it exists.
    buffer[:] = 93
    return buffer


def resident_memory() -> dict[str, float]:
    """Return resident memory in MB (10^6 bytes), mapped file included."""
    memory = process_memory()
    if not memory.resident_bytes:
        return {}
    resident, held = memory.resident_bytes, memory.held_bytes
    parts = {"rss_mb": resident, "anonymous_mb": held, "file_mb": max(0, resident - held)}
    return {name: round(size / 1e6, 1) for name, size in parts.items()}


class StolenTime:
    """CPU time taken by the hypervisor since construction."""

    # Above a few percent, measurements are unreliable.
    def __init__(self) -> None:
        self._before = processors.times()

    def percent(self) -> float:
        """Return the share, 0 if unknown."""
        after = processors.times()
        if len(self._before) < 8 or len(after) < 8:
            return 0.0
        spent = [b - a for a, b in zip(self._before, after, strict=True)]
        return 100.0 * spent[7] / max(1, sum(spent))
