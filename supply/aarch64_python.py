"""Create an aarch64 Python with the program's dependencies in build/aarch64-python, to be run by qemu:

    python supply/aarch64_python.py

Requires Debian's apt, and a current Python of the same version as Debian's. Root is not required: apt uses a separate
state directory, and packages are unpacked without being installed. The wheels are the aarch64 ones locked in supply/.
The test tools are pure Python, and are copied from the current environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = Path(__file__).parent
THERE = ROOT / "build" / "aarch64-python"
DONE = THERE / ".done"

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = (f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib")
LIBRARIES = "libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libsqlite3-0 libffi8 liblzma5 libbz2-1.0 libuuid1"
TEST_TOOLS = ("pytest", "iniconfig", "pluggy", "packaging", "pygments")

APT = """
Dir::State "{there}/apt/state";
Dir::State::status "{there}/apt/status";
Dir::Cache "{there}/apt/cache";
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Sandbox::User "";
Acquire::Languages "none";
"""


def unpack_debian(to: Path) -> None:
    """Unpack Python and its libraries at their places in an installed Debian."""
    for folder in ("apt/state/lists/partial", "apt/cache/archives/partial", "packages"):
        (THERE / folder).mkdir(parents=True)
    (THERE / "apt" / "status").touch()
    configuration = THERE / "apt" / "apt.conf"
    configuration.write_text(APT.format(there=THERE))
    environment = {**os.environ, "APT_CONFIG": str(configuration)}
    for command in (["update", "-qq"], ["download", "-qq", *PYTHON, *LIBRARIES.split()]):
        subprocess.run(["apt-get", *command], check=True, env=environment, cwd=THERE / "packages")
    for package in sorted((THERE / "packages").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, to], check=True)


def unpack_wheels(to: Path) -> None:
    """Unpack the program's dependencies."""
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", VERSION]
    for abi in (f"cp{VERSION.replace('.', '')}", "abi3", "none"):
        target += ["--abi", abi]
    for glibc in range(17, 37):
        target += ["--platform", f"manylinux_2_{glibc}_aarch64"]
    locked = ["--platform", "manylinux2014_aarch64", "--require-hashes", "--no-deps", "-r", str(LOCKS / "run.txt")]
    wheels = THERE / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "-d", str(wheels)]
    subprocess.run([*pip, *target, *locked], check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(to)


def copy_test_tools(to: Path) -> None:
    """Copy distributions without machine code, with their metadata."""
    for name in TEST_TOOLS:
        for file in distribution(name).files or ():
            if file.suffix in (".py", ".typed") or ".dist-info" in file.parts[0]:
                (to / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), to / file)


def main() -> None:
    shutil.rmtree(THERE, ignore_errors=True)
    unpack_debian(THERE / "root")
    unpack_wheels(THERE / "site")
    copy_test_tools(THERE / "site")
    DONE.touch()


if __name__ == "__main__":
    main()
