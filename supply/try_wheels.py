"""Installs the built wheels where there is nothing but Python, and asks the first question: `make test-install`, or

    python supply/try_wheels.py [--suite bookworm ...] [--mirror URL]

Needs root, debootstrap and the package index; so it is no part of the tests that everybody runs. Each Debian is made by
debootstrap without a compiler. What the wheel needs is fetched first, by this machine's pip; then a plain user installs
it there from files alone, asks the demo model, and serves the page. Prints a table in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from bare_debian import USER, bare_root
from target import PYTHONS, fetch

LOCKS = Path(__file__).parent


def in_root(root: Path, command: str) -> tuple[float, str]:
    """Seconds and output of a command of the plain user there."""
    begun = time.monotonic()
    become = ["unshare", "--mount", "--pid", "--fork", "sh", "-c"]
    inside = f'mount -t proc proc {root}/proc && exec chroot {root} su - {USER} -c "$0"'
    done = subprocess.run([*become, inside, command], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    if done.returncode != 0:
        raise SystemExit(f"{root.name}: {command.splitlines()[0]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - begun, done.stdout.strip()


def tried(suite: str, mirror: list[str]) -> list[str]:
    """A row of the table."""
    root = bare_root(suite, mirror)
    fetch(PYTHONS[suite], root / "home" / USER / "wheels")
    compilers = in_root(root, "command -v cc gcc g++ clang make || true")[1]
    if compilers:
        raise SystemExit(f"{suite} has {compilers}")
    shutil.copy(LOCKS / "first_question.py", root / "home" / USER)
    made, _ = in_root(root, "rm -rf venv .cache .local && python3 -m venv venv")
    installed, _ = in_root(root, "PIP_FIND_LINKS=wheels venv/bin/pip install -q --no-index notso-smollm3-bot")
    asked, answer = in_root(root, "venv/bin/notso run --temperature 0 'What is 27 + 48?'")
    _, served = in_root(root, "venv/bin/python first_question.py venv/bin/notso-smollm3-bot serve --no-browser")
    told = json.loads(served.splitlines()[-1])
    if "75" not in answer or "75" not in told["answer"]:
        raise SystemExit(f"{suite}: {answer!r}, {told['answer']!r}")
    total = made + installed + asked
    figures = [made, installed, asked, total, told["page"], told["stop"]]
    return [f"Debian {suite}, Python {PYTHONS[suite]}", *(f"{each:.1f}" for each in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=list(PYTHONS), help="repeatable; default: all")
    parser.add_argument("--mirror", nargs=1, default=[], help="of Debian; default: debootstrap's own")
    options = parser.parse_args()
    head = ["", "venv", "pip install", "first answer", "together", "first page", "stop"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for suite in options.suite or list(PYTHONS):
        print(f"| {' | '.join(tried(suite, options.mirror))} |", flush=True)


if __name__ == "__main__":
    main()
