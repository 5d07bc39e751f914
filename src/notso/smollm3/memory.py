"""How much memory there is, and what a model and its context need: counted before anything is allocated.

The least of three says what may be used: what the kernel calls available, what the control group still grants, and what
the process limits leave. Sizes in bytes.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from notso.smollm3.errors import OutOfMemoryError

MIB = 1 << 20
PROCESS_BYTES = 256 * MIB  # the interpreter, the tokenizer, the web server and its streams
CONTEXT_STEP_TOKENS = 1024
CONTEXT_FLOOR_TOKENS = 2048
_UNLIMITED = 1 << 60  # control groups of version 1 write a huge number where they mean no limit


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on what this process may still allocate. `source` names it for people."""

    source: str
    available_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model with `context_tokens` of context per sequence will occupy, and what there was when it was made."""

    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    sequences: int
    scratch_bytes: int
    limit: MemoryLimit
    reduced: bool  # the context was left to us and is smaller than the model's own

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.context_tokens * self.sequences

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes + PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process occupies now. Of `resident_bytes`, the pages of mapped files can be read again at any time;
    `held_bytes` is what it holds on to, in memory or swapped out."""

    resident_bytes: int
    held_bytes: int


def process_memory(proc: Path = Path("/proc")) -> ProcessMemory:
    """What the kernel counts for this process; zeros where it does not say."""
    fields = _number_lines(proc / "self" / "status")
    held = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0) + fields.get("VmSwap:", 0)
    return ProcessMemory(fields.get("VmRSS:", 0) * 1024, held * 1024)


def memory_limits(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> list[MemoryLimit]:
    """Every bound that applies to this process. Never empty; a bound that cannot be read is left out."""
    limits = [_system_memory(proc)]
    limits += _cgroup_limits(proc, cgroup_root)
    limits += _process_limits(proc)
    return limits


def available_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """The tightest bound."""
    return min(memory_limits(proc, cgroup_root), key=lambda limit: limit.available_bytes)


def largest_context(
    *,
    weights_bytes: int,
    kv_bytes_per_token: int,
    available_bytes: int,
    sequences: int = 1,
    scratch_bytes: int = 0,
) -> int:
    """The largest context in tokens, a multiple of 1,024, that fits; 0 where not even one step does."""
    room = available_bytes - weights_bytes - scratch_bytes - PROCESS_BYTES
    step_bytes = kv_bytes_per_token * sequences * CONTEXT_STEP_TOKENS
    return max(0, room // step_bytes) * CONTEXT_STEP_TOKENS


def plan_memory(
    *,
    weights_bytes: int,
    kv_bytes_per_token: int,
    max_context_tokens: int,
    requested_tokens: int | None = None,
    sequences: int = 1,
    scratch_bytes: int = 0,
    limit: MemoryLimit | None = None,
) -> MemoryPlan:
    """Choose a context that fits, or refuse.

    requested_tokens None: the largest up to `max_context_tokens` that fits, in steps of 1,024, never under 2,048 (or
    under `max_context_tokens` where that is smaller). A number: exactly that.

    Raises OutOfMemoryError, naming what is needed, what there is and the largest context that would fit.
    """
    limit = limit or available_memory()
    fits = largest_context(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        available_bytes=limit.available_bytes,
        sequences=sequences,
        scratch_bytes=scratch_bytes,
    )
    if requested_tokens is not None:
        context = requested_tokens
    elif fits >= max_context_tokens:
        context = max_context_tokens
    else:
        context = max(fits, min(CONTEXT_FLOOR_TOKENS, max_context_tokens))
    plan = MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        context_tokens=context,
        sequences=sequences,
        scratch_bytes=scratch_bytes,
        limit=limit,
        reduced=requested_tokens is None and context < max_context_tokens,
    )
    if plan.needed_bytes > limit.available_bytes:
        advice = f"{fits:,} tokens would fit" if fits >= CONTEXT_FLOOR_TOKENS else "no useful context would fit"
        raise OutOfMemoryError(
            f"a context of {context:,} tokens needs {_mib(plan.needed_bytes)}, "
            f"{limit.source} leaves {_mib(limit.available_bytes)}; {advice}",
            needed_bytes=plan.needed_bytes,
            available_bytes=limit.available_bytes,
        )
    return plan


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // MIB:,} MiB"


def _system_memory(proc: Path) -> MemoryLimit:
    fields = _number_lines(proc / "meminfo")
    if "MemAvailable:" in fields:
        return MemoryLimit("the system", fields["MemAvailable:"] * 1024)
    return MemoryLimit("the machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cgroup_limits(proc: Path, root: Path) -> list[MemoryLimit]:
    """Bounds of the control group this process is in and of every group above it: each of them holds."""
    limits = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, usage_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, usage_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            granted = _number(folder / limit_file)
            if granted is None or granted >= _UNLIMITED:
                continue
            used = (_number(folder / usage_file) or 0) - _page_cache(folder)
            limits.append(MemoryLimit("the control group", max(0, granted - max(0, used))))
    return limits


def _page_cache(folder: Path) -> int:
    """File pages charged to the group: the kernel drops them when memory is asked for, the model file's among them."""
    fields = _number_lines(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in fields else ""
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def _process_limits(proc: Path) -> list[MemoryLimit]:
    fields = _text(proc / "self" / "statm").split()
    page = os.sysconf("SC_PAGE_SIZE")
    used = {"address space": 0, "data": 0}
    if len(fields) >= 6:
        used = {"address space": int(fields[0]) * page, "data": int(fields[5]) * page}
    limits = []
    for name, which in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(f"the {name} limit (ulimit)", max(0, soft - used[name])))
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _number_lines(path: Path) -> dict[str, int]:
    """`name number` lines, as /proc/meminfo and memory.stat have them; a unit after the number is left out."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}
