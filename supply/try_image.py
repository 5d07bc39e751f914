"""Test deploy/Containerfile without a container engine: `make test-image`, or

    python supply/try_image.py [--mirror URL]

Needs root, debootstrap and a Debian mirror. The instructions are executed in a chroot; the base image is replaced by a
minimal Debian from debootstrap, reduced like the slim images. The size is checked; then the command runs as the file's
user on a read-only root, with writable volumes, and must pass the health check and answer a question. The container
engine itself, its network and its volumes are not tested.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bare_debian import ROOTS, confined, copy_of
from target import ROOT

FILE = ROOT / "deploy" / "Containerfile"
MOST_BYTES = 150_000_000
MOST_SECONDS = 10  # for stopping: the default timeout of container engines
SLIM = ("doc", "info", "locale", "man", "lintian", "linda", "groff")  # in usr/share; slim images do not have them
KEY = "a-key-for-this-trial-only"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) of a Containerfile."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def settings(text: str) -> dict[str, str]:
    """Return the arguments of the last stage's instructions by instruction; those of several ENV are joined."""
    said: dict[str, str] = {}
    for word, rest in instructions(text):
        if word == "FROM":
            said = {}
        said[word] = f"{said[word]} {rest}" if word == "ENV" and word in said else rest
    return said


def base(image: str, mirror: list[str]) -> Path:
    """Return a root that is similar to the image `debian:SUITE-slim`."""
    suite = image.removeprefix("debian:").removesuffix("-slim")
    root = ROOTS / f"{suite}-slim"
    if not (root / "usr" / "bin" / "apt").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        command = ["debootstrap", "--variant=minbase", suite, root, *mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(root / "var/cache/apt")
        for name in SLIM:
            shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
    return root


def build(text: str, mirror: list[str]) -> Path:
    """Execute the instructions, and return the root of the last stage."""
    stages: dict[str, Path] = {}
    root = Path()
    for word, rest in instructions(text):
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            root = stages[name] = copy_of(base(image, mirror), f"image-{name or 'last'}")
        elif word == "RUN":
            shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
            subprocess.run(["chroot", root, "sh", "-ec", rest], check=True, stdout=subprocess.DEVNULL)
        elif word == "COPY" and rest.startswith("--from="):
            name, source, target = rest.removeprefix("--from=").split()
            subprocess.run(["cp", "--archive", f"{stages[name]}{source}/.", f"{root}{target}"], check=True)
        elif word == "COPY":
            source, target = rest.split()
            (root / target.lstrip("/")).mkdir()
            for found in ROOT.glob(source):
                shutil.copy(found, root / target.lstrip("/"))
    return root


def compressed_bytes(root: Path) -> int:
    """Return the size of a root as a gzip-compressed image layer."""
    tar = subprocess.Popen(["tar", "--create", "--directory", root, "."], stdout=subprocess.PIPE)
    counted = subprocess.run(["sh", "-c", "gzip | wc -c"], stdin=tar.stdout, capture_output=True, check=True)
    if tar.wait() != 0:
        raise SystemExit("tar failed")
    return int(counted.stdout)


def run(root: Path, text: str) -> dict[str, Any]:
    """Run the image's command, wait for its health check, and ask a question. Returns the measurements."""
    said = settings(text)
    variables = dict(each.split("=", 1) for each in shlex.split(said["ENV"])) | {"NOTSO_API_KEY": KEY}
    state = ROOTS / "image-state"
    shutil.rmtree(state, ignore_errors=True)
    writable = {folder: state / folder.strip("/") for folder in said["VOLUME"].split()}
    check = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    command = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"])]
    shutil.copy(ROOT / "supply" / "first_question.py", root)
    script = "if touch /var/written 2>&-; then exit 9; fi; "
    script += (
        f'"$@" >&2 & i=0; until {shlex.join(check)} >&2; do i=$((i + 1)); [ $i -lt 60 ] || exit 8; sleep 1; done; '
    )
    script += "python3 /first_question.py; begun=$(date +%s%3N); kill $!; wait $!; echo $(($(date +%s%3N) - begun))"
    told, stop = confined(
        root, writable, variables, ["sh", "-ec", script, "sh", *command], user=said["USER"].partition(":")[0]
    ).splitlines()
    return dict(json.loads(told)) | {"stop": int(stop) / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", nargs=1, default=[], help="Debian mirror (default: debootstrap's)")
    options = parser.parse_args()
    text = FILE.read_text()
    root = build(text, options.mirror)
    size = compressed_bytes(root)
    told = run(root, text)
    if not re.search(r"\b75\b", str(told["answer"])):
        raise SystemExit(f"the answer must contain 75: {told['answer']!r}")
    print(f"compressed size {size / 1e6:.1f} MB; answer {told['answer']!r}; stopped in {told['stop']:.1f} s")
    if told["stop"] > MOST_SECONDS:
        raise SystemExit(f"stopping must take at most {MOST_SECONDS} s")
    if size > MOST_BYTES:
        raise SystemExit(f"the compressed size must be at most {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
