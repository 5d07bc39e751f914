"""The kernel tests in this folder, run by an AArch64 Python under qemu with all of its families."""

from __future__ import annotations

from pathlib import Path

import aarch64
import pytest
from aarch64 import I8MM

TESTS = Path(__file__).parent
# Only files of this folder: the conftest.py above needs packages that this Python does not have.
ALONE = ("-c", "/dev/null", "--rootdir", str(TESTS), "--confcutdir", str(TESTS), "--import-mode=importlib")

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.skipif(bool(aarch64.python_missing()), reason=aarch64.python_missing() or "-"),
    pytest.mark.timeout(7200),
]


def test_kernel_tests_pass_on_emulated_aarch64(tmp_path: Path) -> None:
    aarch64.install(tmp_path)
    files = sorted(str(path) for path in TESTS.glob("test_kernels_*.py"))
    assert len(files) == 6
    run = aarch64.run_python(I8MM, tmp_path, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ALONE, *files)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    print(run.stdout.strip().splitlines()[-1])
