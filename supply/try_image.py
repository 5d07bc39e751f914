"""Makes the root filesystem that deploy/Containerfile describes, without docker, and runs it: `make test-image`.

    python supply/try_image.py [--mirror URL]

Needs root, debootstrap and Debian's archive. Every line of the file is done in order, in a chroot; only the base is
another: a minbase without manuals, made by debootstrap as the slim images are. Then its size is measured, and the
command runs with a read-only root, as the file's user, with only the volumes to write in; the health check and the
first question are asked of it. What this does not try: a container engine, its network and its volumes.
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
MOST_SECONDS = 10  # from the signal to the end: what container engines wait by default
SLIM = ("doc", "info", "locale", "man", "lintian", "linda", "groff")  # of usr/share, which the slim images leave out
KEY = "a-key-for-this-trial-only"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(word, rest) of each line, as a builder reads them."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def settings(text: str) -> dict[str, str]:
    """What the last stage says of running: the rest of each of its lines by word; ENV and the like are put together."""
    said: dict[str, str] = {}
    for word, rest in instructions(text):
        if word == "FROM":
            said = {}
        said[word] = f"{said[word]} {rest}" if word == "ENV" and word in said else rest
    return said


def base(image: str, mirror: list[str]) -> Path:
    """`debian:SUITE-slim`, or nearly."""
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
    """The root of the last stage."""
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
    """As one layer, by gzip, as registries keep it."""
    tar = subprocess.Popen(["tar", "--create", "--directory", root, "."], stdout=subprocess.PIPE)
    counted = subprocess.run(["sh", "-c", "gzip | wc -c"], stdin=tar.stdout, capture_output=True, check=True)
    if tar.wait() != 0:
        raise SystemExit("tar failed")
    return int(counted.stdout)


def run(root: Path, text: str) -> dict[str, Any]:
    """The first question's figures, and the seconds of the end; the health check has passed before it."""
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
    parser.add_argument("--mirror", nargs=1, default=[], help="of Debian; default: debootstrap's own")
    options = parser.parse_args()
    text = FILE.read_text()
    root = build(text, options.mirror)
    size = compressed_bytes(root)
    told = run(root, text)
    if not re.search(r"\b75\b", str(told["answer"])):
        raise SystemExit(f"{told['answer']!r}")
    print(f"{size / 1e6:.1f} MB compressed; answered {told['answer']!r}, stopped after {told['stop']:.1f} s")
    if told["stop"] > MOST_SECONDS:
        raise SystemExit(f"at most {MOST_SECONDS} s are wanted")
    if size > MOST_BYTES:
        raise SystemExit(f"at most {MOST_BYTES / 1e6:.0f} MB are wanted")


if __name__ == "__main__":
    main()
