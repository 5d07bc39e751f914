"""Pytest plugin for the darwin-like run: skip tests that depend on Linux, and report the numbers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

LINUX = re.compile(
    r"/proc|/sys/|sched_|memfd|prctl|RLIMIT_AS|posix_fadvise|hugepage|huge_pages|MADV_|aarch64|qemu|postgres"
)
"""Matches the source of tests that inspect Linux itself or need PostgreSQL or an emulator."""

ABOUT_LINUX = {
    "tests/system/test_memory.py": "control groups and glibc's heaps are Linux's",
    "tests/cli/test_private_memory.py": "who reads a process's environment is Linux's to say",
    r"test_peer_process_exits_when_benchmark_is_killed\[PyDLL": "PR_SET_PDEATHSIG is Linux's",
    "test_cpu_time_is_granted_up_to_the_limit": "macOS has no prlimit: a child's time cannot be extended",
    "test_doctor_reports_missing_confinement_features": "nothing is missing on Linux alone; see test_macos.py",
    r"test_quotas.py.*\[three": "it needs PostgreSQL",
    r"test_template_bombs_are_stopped_early.*out of memory": "macOS does not enforce RLIMIT_AS",
}
"""Pattern of test ids -> reason why these tests cannot pass on macOS."""


MARK = "darwin-like: "


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    run = sum(len(stats.get(outcome, ())) for outcome in ("passed", "failed"))
    skipped = [str(report.longrepr) for report in stats.get("skipped", ())]
    about_linux = sum(MARK in reason for reason in skipped)
    share = 100 * run / max(1, run + len(skipped))
    terminalreporter.write_line(
        f"{MARK}{run:,} tests run ({share:.0f} %), {about_linux:,} left out because they are about Linux, "
        f"{len(skipped) - about_linux:,} for the reasons they have everywhere"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "function", None)
        reasons = [reason for name, reason in ABOUT_LINUX.items() if re.search(name, item.nodeid)]
        if function is not None and LINUX.search(inspect.getsource(function) + item.nodeid):
            reasons.append("it looks at Linux itself")
        if reasons:
            item.add_marker(pytest.mark.skip(reason=MARK + reasons[0]))
