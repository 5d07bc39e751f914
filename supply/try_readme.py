"""Test the commands of README's quick start in a new Debian: `make test-readme`, or

    python supply/try_readme.py [--suite bookworm] [--mirror URL]

Needs root, debootstrap and the package index. The Debian has only the packages required by README, and the commands run
as a normal user, offline, with dependencies downloaded beforehand. Each command's result is checked, except for the
download of the 3B model, which must fail without a network.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
from pathlib import Path

from bare_debian import ROOTS, USER, bootstrap
from emulation import apart
from matrix import PACKAGES
from target import PYTHONS, ROOT, fetch_locked

HOME = Path("home") / USER
WAIT = """\
until python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:3000/health")' 2>/dev/null; do
  kill -0 $1 || break
  sleep 0.2
done
kill -0 $1
"""
ASK = """\
python3 - <<'END'
import json, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "What is 27 + 48?"}]}).encode()
asked = urllib.request.Request("http://127.0.0.1:3000/v1/chat/completions", body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
page = urllib.request.urlopen("http://127.0.0.1:3000/").read().decode()
assert "<textarea" in page, page[:500]
END
"""


def lines() -> list[str]:
    """Return the commands in README's first code block, without comments."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


def root_of(suite: str, mirror: list[str]) -> Path:
    """Return a Debian with the required packages, a user, and a clone of the committed sources in the user's home."""
    root = ROOTS / f"{suite}-readme"
    if not (root / "home" / USER).is_dir():
        bootstrap(root, suite, mirror, platform.machine(), f"--include={PACKAGES}")
        subprocess.run(["chroot", root, "/usr/sbin/useradd", "--create-home", USER], check=True)
    clone = root / HOME / "notso"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", clone], check=True)
    fetch_locked(PYTHONS[suite], platform.machine(), root / HOME / "wheels")
    subprocess.run(["chroot", root, "chown", "--recursive", f"{USER}:", f"/{HOME}"], check=True)
    return root


def said(root: Path, command: str, *, has_network: bool = False) -> str:
    """Run a command in the user's login shell and return its output. Raises SystemExit if it fails."""
    alone = "" if has_network else 'unshare --net -- sh -c \'ip link set lo up && exec "$0" "$@"\' '
    inside = f'mount -t proc proc "$0/proc"; exec {alone}chroot "$0" su - {USER} -c "$1"'
    done = apart(platform.machine(), inside, root, f"cd notso && {command}")
    if done.returncode != 0:
        raise SystemExit(f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def served(command: str) -> str:
    """Return a script that starts the server with a command, asks it a question and stops it."""
    begin = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS=$HOME/wheels; {command} > ~/log 2>&1 & set -- $!; "
    return f"{begin}{{ {WAIT}}} || {{ cat ~/log; exit 1; }}\n{ASK}kill $1; wait $1 || true; tail -n 5 ~/log"


def main() -> None:
    """Run the commands in order, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="bookworm", help="Debian release (default: bookworm)")
    parser.add_argument("--mirror", nargs=1, default=[], help="Debian mirror (default: debootstrap's)")
    arguments = parser.parse_args()
    run, link, pull, start = lines()
    root = root_of(arguments.suite, arguments.mirror)
    print(f"{run}: {said(root, served(run)).splitlines()[0]}", flush=True)
    print(f"{link}: {said(root, link)}", flush=True)
    refused = said(root, f"! {pull} 2>&1 && test $? != 127")  # fails without a network
    print(f"{pull}: {refused.splitlines()[-1]}", flush=True)
    print(f"{start}: {said(root, served(start)).splitlines()[0]}")


if __name__ == "__main__":
    main()
