"""Available memory according to the kernel, control groups and process limits."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from notso.system.memory import HEAPS, MIB, MemoryLimit, available_memory, memory_limits, process_memory


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> list[MemoryLimit]:
    """Return limits of a simulated machine with 8 GiB available; `files` are in its control group file system."""
    tree(root / "proc", {"meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8388608 kB\n", "self/cgroup": cgroup})
    tree(root / "cg", files)
    return memory_limits(0, root / "proc", root / "cg")


def test_memory_limits_of_this_machine_are_positive() -> None:
    limits = memory_limits()

    assert limits
    assert all(limit.available_bytes > 0 for limit in limits)
    assert available_memory().source in {limit.source for limit in memory_limits()}  # two readings may differ


@pytest.mark.skipif(sys.platform == "darwin", reason="reads /proc")
def test_limits_name_the_resident_memory_of_this_process_if_it_was_subtracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither memory in swap nor address space counts: the latter grows while a server starts."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    status = {"../proc/self/status": "RssAnon: 2048 kB\nVmSwap: 9000 kB\nVmRSS: 4096 kB\n"}
    group = {"a/memory.max": str(4 << 30), "a/memory.current": "0"}
    sizes = {"../proc/self/statm": "1 1 1 1 1 1 1"}
    limits = machine(tmp_path, "0::/a\n", {**status, **group, **sizes})
    own = [(limit.source.partition(" (")[0], limit.own_bytes) for limit in limits]
    process = [("the address space limit", 0), ("the data limit", 0)]
    assert own == [("the system", 2 * MIB), ("the control group", 2 * MIB), *process]
    assert available_memory(0, tmp_path / "proc").own_bytes == 2 * MIB


def test_system_memory_is_the_limit_without_control_groups(tmp_path: Path) -> None:
    assert machine(tmp_path, "", {}) == [MemoryLimit("the system", 8192 * MIB)]


def test_control_group_without_a_limit_is_ignored(tmp_path: Path) -> None:
    limits = machine(tmp_path, "0::/app\n", {"app/memory.max": "max\n", "app/memory.current": "5\n"})

    assert [limit.source for limit in limits] == ["the system"]


def test_cgroup_v2_limit_counts_file_pages_as_available(tmp_path: Path) -> None:
    limits = machine(
        tmp_path,
        "0::/app\n",
        {
            "app/memory.max": f"{1000 * MIB}\n",
            "app/memory.current": f"{600 * MIB}\n",
            "app/memory.stat": f"anon {200 * MIB}\ninactive_file {150 * MIB}\nactive_file {250 * MIB}\n",
        },
    )

    assert limits[1:] == [MemoryLimit("the control group", 800 * MIB)]


def test_limit_of_a_parent_control_group_applies(tmp_path: Path) -> None:
    limits = machine(
        tmp_path,
        "0::/outer/inner\n",
        {"outer/memory.max": f"{100 * MIB}", "outer/inner/memory.max": f"{400 * MIB}"},
    )

    assert min(limit.available_bytes for limit in limits) == 100 * MIB


def test_cgroup_v1_limit_is_read_from_the_container_root(tmp_path: Path) -> None:
    limits = machine(
        tmp_path,
        "5:devices:/\n4:memory:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{512 * MIB}\n",
            "memory/memory.usage_in_bytes": f"{200 * MIB}\n",
            "memory/memory.stat": (
                f"inactive_file 1\nactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {80 * MIB}\n"
            ),
        },
    )

    assert limits[1:] == [MemoryLimit("the control group", 412 * MIB)]


def test_cgroup_v1_without_a_limit_is_ignored(tmp_path: Path) -> None:
    limits = machine(tmp_path, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"})

    assert len(limits) == 1


def test_exceeded_control_group_limit_leaves_no_memory(tmp_path: Path) -> None:
    limits = machine(tmp_path, "0::/\n", {"memory.max": "1000", "memory.current": "5000"})

    assert limits[1].available_bytes == 0


def test_address_space_limit_is_reduced_by_current_use() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from notso.system.memory import memory_limits\n"
        "print([l.available_bytes for l in memory_limits() if 'address space' in l.source])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    (available,) = [int(word) for word in out.strip("[]\n").split(",")]

    assert (3 << 30) - 1024 * MIB < available < 3 << 30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY  # the limit of this process is unchanged


@pytest.mark.skipif(sys.platform != "linux", reason="the system must limit the address space")
def test_native_threads_that_cannot_start_are_a_memory_shortage() -> None:
    code = (
        "import resource\n"
        "from notso.qtensor.backends.cpu import kernel_choice\n"
        "from notso.qtensor.errors import KernelChoiceError\n"
        "from notso.system.memory import is_memory_shortage\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    kernel_choice.set_threads(1024)\n"
        "except KernelChoiceError as error:\n"
        "    print(is_memory_shortage(error))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_mapped_bytes_are_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("5000 900 800 700 0 400 0\n")  # in pages; the first is the address space
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from notso.system.memory import available_memory, memory_limits\n"
        "proc = Path(sys.argv[1])\n"
        "limits = lambda mapped: [l for l in memory_limits(mapped, proc) if 'address space' in l.source]\n"
        "print(limits(1 << 20)[0].available_bytes - limits(0)[0].available_bytes)\n"
        "print(available_memory(1 << 40, proc).available_bytes)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    more, most = (int(word) for word in out.split())

    assert more == 1 << 20
    assert most <= 3 << 30


def test_process_memory_tracks_allocations() -> None:
    before = process_memory()
    assert 0 < before.held_bytes <= before.resident_bytes
    block = bytearray(b"\x01") * (64 * MIB)
    after = process_memory()
    assert 60 * MIB < after.held_bytes - before.held_bytes < 80 * MIB
    del block
    assert process_memory(Path("/nowhere")).resident_bytes == 0


HEAPS_OF_THREADS = """
import ctypes, re, sys, threading
from notso.qtensor import limit_malloc_arenas

if sys.argv[2] == "few":
    limit_malloc_arenas()
library = ctypes.CDLL(None)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p
taken, told = threading.Barrier(33), threading.Barrier(33)

def take():
    library.malloc(1000)
    taken.wait()
    told.wait()

for _ in range(32):
    threading.Thread(target=take).start()
taken.wait()
file = ctypes.c_void_p(library.fopen(sys.argv[1].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
told.wait()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_keep_few_heaps_limits_heaps_of_many_threads(tmp_path: Path) -> None:
    heaps = {}
    for how in ("many", "few"):
        subprocess.run([sys.executable, "-c", HEAPS_OF_THREADS, str(tmp_path / how), how], check=True)
        heaps[how] = (tmp_path / how).read_text().count("<heap nr=")
    assert heaps["few"] <= HEAPS < heaps["many"]
