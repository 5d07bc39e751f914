"""Create the environment for the darwin-like run and run the tests in it: `make test-darwin`, or

    python tests/darwin/environment.py [pytest's arguments]

The virtual environment is in build/darwin. Its Python and all child processes are disguised (disguise.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from darwin.names import linux_only
from darwin.places import FAULTS, LIBRARY, NAMES, PLACE, ROOT

LEFT_OUT = ("architecture", "browser", "chaos", "clients", "cluster", "freeze", "parity")
"""Folders with tests of the repository, of browsers, or of programs that run in other environments."""


def disguised_python() -> Path:
    """Return a Python whose processes see macOS; create it if it is missing or outdated."""
    here, python = Path(__file__).parent, PLACE / "bin" / "python"
    names = json.dumps({module: sorted(names) for module, names in linux_only().items()})
    made_of = names + "".join(path.read_text() for path in sorted(here.iterdir()) if path.suffix in (".py", ".c"))
    if not (PLACE / "made_of").exists() or (PLACE / "made_of").read_text() != made_of:
        shutil.rmtree(PLACE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", PLACE], check=True)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("the stand-in for libSystem needs a C compiler")
        build = [compiler, "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-o", LIBRARY]
        subprocess.run([*build, here / "libsystem.c"], check=True)
        NAMES.write_text(names)
        site = PLACE / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        packages = sysconfig.get_path("purelib")
        (site / "darwin.pth").write_text(
            f"import site; site.addsitedir({packages!r})\n"
            f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import darwin.disguise\n"
        )
        (PLACE / "made_of").write_text(made_of)
    return python


def main() -> None:
    python = disguised_python()
    FAULTS.unlink(missing_ok=True)
    chosen = sys.argv[1:]
    if not any(word.startswith("tests/") for word in chosen):
        chosen += sorted(str(path) for path in Path("tests").iterdir() if path.is_dir() and path.name not in LEFT_OUT)
    command = [python, "-m", "pytest", "-p", "darwin.plugin", "-p", "no:cacheprovider", *chosen]
    environment = {name: value for name, value in os.environ.items() if name != "TESTS_PLANNED"}
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if FAULTS.exists() and FAULTS.read_text():
        raise SystemExit(f"notso read folders of Linux:\n{FAULTS.read_text()}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
