"""Machine description, memory use and CPU steal time, for the interpretation of measurements."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import kernel_choice, zeroed

Bytes = npt.NDArray[np.uint8]


def describe_machine() -> dict[str, Any]:
    """Return date, CPU, memory, kernel and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "features": kernel_choice.cpu_features(),
        "cores": len(kernel_choice.usable_cpus()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_name() -> str:
    """Return the processor's model name, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def probe_buffer(size_bytes: int) -> Bytes:
    """Return a resident uint8 buffer."""
    buffer = zeroed(size_bytes)
    # Every page is written so that it exists.
    buffer[:] = 93
    return buffer


def resident_memory() -> dict[str, float]:
    """Return resident memory in MB (10^6 bytes), mapped file included."""
    wanted = {"VmRSS:": "rss_mb", "RssAnon:": "anonymous_mb", "RssFile:": "file_mb"}
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {wanted[words[0]]: round(int(words[1]) * 1024 / 1e6, 1) for words in fields if words and words[0] in wanted}


class StolenTime:
    """CPU time taken by the hypervisor since construction."""

    # Above a few percent, measurements are unreliable.
    def __init__(self) -> None:
        self._before = _cpu_times()

    def percent(self) -> float:
        """Return the share, 0 if unknown."""
        after = _cpu_times()
        if len(self._before) < 8 or len(after) < 8:
            return 0.0
        spent = [b - a for a, b in zip(self._before, after, strict=True)]
        return 100.0 * spent[7] / max(1, sum(spent))


def _cpu_times() -> list[int]:
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []
