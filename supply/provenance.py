"""Provenance of a release's files, as an in-toto statement with SLSA provenance v1.

It gives the SHA-256 of each file, the commit, the lock files and the tools. It is not signed; GitHub Actions, building
from the tag, signs its own (.github/workflows/release.yml). It contains no times and no paths, so the same commit and
Python give the same statement.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from target import MACHINES

LOCKS = ("build.txt", "run.txt", "wheels.txt")
"""Lock files of the build tools and of the runtime dependencies."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def statement(root: Path, version: str, commit: str, files: Iterable[Path]) -> dict[str, Any]:
    """Return the statement.

    root: a checkout of the commit.
    """
    supply = root / "supply"
    tools = dict(re.findall(r"^(\S+)==(\S+?)(?: |$)", (supply / "wheels.txt").read_text(), re.MULTILINE))
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path)}} for path in sorted(files)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:notso:make-release",
                "externalParameters": {"command": f"make release VERSION={version}", "machines": list(MACHINES)},
                "internalParameters": {"python": platform.python_version(), "tools": tools},
                "resolvedDependencies": [
                    {"name": "sources", "digest": {"gitCommit": commit}},
                    *({"name": f"supply/{name}", "digest": {"sha256": digest(supply / name)}} for name in LOCKS),
                ],
            },
            "runDetails": {"builder": {"id": "urn:notso:unsigned"}},
        },
    }


def write(root: Path, version: str, commit: str, files: Iterable[Path], to: Path) -> None:
    to.write_text(json.dumps(statement(root, version, commit, files), indent=2) + "\n")
