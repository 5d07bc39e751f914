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
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = Path(__file__).parent
DIST = ROOT / "dist"
ROOTS = ROOT / "build" / "roots"

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
USER = "me"

SERVE = """
import json, socket, subprocess, time, urllib.request
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
begun = time.monotonic()
command = ["venv/bin/notso-smollm3-bot", "serve", "--port", str(port), "--no-browser"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
def get(path, data=None):
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
        return answer.read().decode()
def wait_for(path):
    while True:
        try:
            return get(path)
        except OSError:  # nobody listens yet, or the model is being loaded
            assert server.poll() is None and time.monotonic() < begun + 60
            time.sleep(0.02)
page = wait_for("/")
first_page = time.monotonic() - begun
wait_for("/health")
model = json.loads(get("/v1/models"))["data"][0]["id"]
question = {"model": model, "messages": [{"role": "user", "content": "What is 27 + 48?"}], "temperature": 0}
answer = json.loads(get("/v1/chat/completions", json.dumps(question).encode()))["choices"][0]["message"]["content"]
server.terminate()
ended = time.monotonic()
assert server.wait(30) == 0 and "<textarea" in page
print(json.dumps({"page": first_page, "answer": answer, "stop": time.monotonic() - ended}))
"""


def bare_root(suite: str, mirror: list[str]) -> Path:
    """A Debian with Python and no compiler, and a user."""
    root = ROOTS / suite
    if not (root / "home" / USER).is_dir():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", suite, root, *mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["chroot", root, "useradd", "--create-home", USER], check=True)
    return root


def wheels_for(python: str, root: Path) -> None:
    """Ours and all it needs, in the user's home."""
    house = root / "home" / USER / "wheels"
    shutil.rmtree(house, ignore_errors=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tag = "cp311-cp311" if python == "3.11" else "cp312-abi3"
    (ours,) = DIST.glob(f"*-{version}-{tag}-*.whl")
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        target += ["--abi", abi]
    for glibc in range(17, 37):
        target += ["--platform", f"manylinux_2_{glibc}_x86_64"]
    target += ["--platform", "manylinux2014_x86_64"]
    locked = [
        "--require-hashes",
        "--no-deps",
        "-r",
        LOCKS / "build.txt",
        "-r",
        LOCKS / "run.txt",
    ]  # they do not overlap
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", house, *target, *locked], check=True)
    shutil.copy(ours, house)


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
    wheels_for(PYTHONS[suite], root)
    compilers = in_root(root, "command -v cc gcc g++ clang make || true")[1]
    if compilers:
        raise SystemExit(f"{suite} has {compilers}")
    (root / "home" / USER / "serve.py").write_text(SERVE)
    made, _ = in_root(root, "rm -rf venv .cache .local && python3 -m venv venv")
    installed, _ = in_root(root, "PIP_FIND_LINKS=wheels venv/bin/pip install -q --no-index notso-smollm3-bot")
    asked, answer = in_root(root, "venv/bin/notso run --temperature 0 'What is 27 + 48?'")
    _, served = in_root(root, "venv/bin/python serve.py")
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
