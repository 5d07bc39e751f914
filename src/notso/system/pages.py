"""Pages of 2 MiB, which Linux provides on request. macOS has none; its ordinary ones have 16 KiB."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

HUGE_PAGE_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def huge_page_policy() -> str:
    """Return "always", "madvise" or "never", or an empty string if the system has no such pages."""
    if sys.platform == "darwin":
        return ""
    try:
        setting = Path(HUGE_PAGE_SETTING).read_text()
        return setting[setting.index("[") + 1 : setting.index("]")]
    except (OSError, ValueError):
        return ""


def have_huge_pages() -> bool:
    """Return whether `use_huge_pages` can succeed."""
    return huge_page_policy() not in ("", "never")


def use_huge_pages(memory: mmap.mmap) -> None:
    """Back memory with huge pages as it is written. Raise OSError if the system has none."""
    if sys.platform == "darwin":
        raise OSError("macOS has no huge pages")
    memory.madvise(mmap.MADV_HUGEPAGE)


def huge_page_bytes() -> int:
    """Return the anonymous memory of this process on huge pages (0 if unknown)."""
    if sys.platform == "darwin":
        return 0
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
