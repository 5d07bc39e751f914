"""Test the built wheels in minimal Debians without a compiler: `make test-install`, or

    python supply/try_wheels.py [--machine aarch64 ...] [--suite bookworm ...] [--mirror URL]

Needs root, debootstrap and the package index, so it is separate from the other tests. In each Debian, a normal user
installs the wheel with dependencies downloaded beforehand, asks the demo model a question, and starts the server. Other
architectures are emulated by qemu, without timings. Prints a table in seconds, and the fingerprints of the answer and
of the model's logits, which must be the same in all rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path

from bare_debian import USER, bare_root, copy_of
from emulation import apart
from target import MACHINES, PYTHONS, fetch

LOCKS = Path(__file__).parent

OF_THE_MODEL = (
    "from notso import Engine; "
    "from notso.qtensor.backends.cpu.kernel_choice import kernels; "
    "from notso.smollm3.diagnostics.verification import model_fingerprint as of; "
    "engine = Engine.load(); print(kernels(), of(engine)); engine.close()"
)


def in_root(root: Path, machine: str, command: str) -> tuple[float, str]:
    """Run a command as the user. Returns (seconds, output)."""
    begun = time.monotonic()
    inside = f'mount -t proc proc {root}/proc; exec chroot {root} su - {USER} -c "$0"'
    done = apart(machine, inside, command)
    if done.returncode != 0:
        raise SystemExit(f"{root.name}: {command.splitlines()[0]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - begun, done.stdout.strip()


def tried(suite: str, machine: str, mirror: list[str]) -> tuple[list[str], tuple[str, str]]:
    """Install and run the wheel. Returns a row of the table, and the fingerprints of the answer and the model."""
    bare = bare_root(suite, mirror, machine)
    root = copy_of(bare, f"{bare.name}-wheels")  # other tests must not see changes
    fetch(PYTHONS[suite], machine, root / "home" / USER / "wheels")
    compilers = in_root(root, machine, "command -v cc gcc g++ clang make || true")[1]
    if compilers:
        raise SystemExit(f"{suite} must have no compilers, but has {compilers}")
    shutil.copy(LOCKS / "first_question.py", root / "home" / USER)
    made, _ = in_root(root, machine, "rm -rf venv .cache .local && python3 -m venv venv")
    install = "PIP_FIND_LINKS=wheels venv/bin/pip install -q --no-index notso-smollm3-bot"
    installed, _ = in_root(root, machine, install)
    asked, said = in_root(root, machine, "venv/bin/notso run --json --temperature 0 'What is 27 + 48?'")
    answer = json.loads(said)
    serve = "venv/bin/python first_question.py venv/bin/notso-smollm3-bot serve --no-browser"
    told = json.loads(in_root(root, machine, serve)[1].splitlines()[-1])
    if "75" not in answer["text"] or "75" not in told["answer"]:
        raise SystemExit(f"{suite}: both answers must contain 75: {answer['text']!r}, {told['answer']!r}")
    family, model = in_root(root, machine, f'venv/bin/python -c "{OF_THE_MODEL}"')[1].split()
    total = made + installed + asked
    figures = [f"{each:.1f}" for each in (made, installed, asked, total, told["page"], told["stop"])]
    if machine != platform.machine():
        figures = ["qemu"] * len(figures)
    name = f"{machine}, Debian {suite}, Python {PYTHONS[suite]}"
    return [name, *figures, family], (answer["fingerprint"], model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--machine", action="append", choices=MACHINES, help="architecture, repeatable (default: this machine's)"
    )
    parser.add_argument(
        "--suite", action="append", choices=list(PYTHONS), help="Debian release, repeatable (default: all)"
    )
    parser.add_argument("--mirror", nargs=1, default=[], help="Debian mirror (default: debootstrap's)")
    options = parser.parse_args()
    head = ["", "venv", "pip install", "first answer", "total", "first page", "stop", "kernels"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    found = set()
    for machine in options.machine or [platform.machine()]:
        for suite in options.suite or list(PYTHONS):
            row, fingerprints = tried(suite, machine, options.mirror)
            print(f"| {' | '.join(row)} |", flush=True)
            found.add(fingerprints)
    if len(found) != 1:
        raise SystemExit(f"the rows' fingerprints (answer, model) differ: {found}")
    print("fingerprints of the answer and of the model: {}, {}".format(*found.pop()))


if __name__ == "__main__":
    main()
