"""Write a CycloneDX 1.6 bill of materials (SBOM) of the program: `make sbom`.

It lists the runtime dependencies, with the SHA-256 of each archive in the lock file, and the third-party files of the
chat page.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

from audit import OURS, license_of
from lock import ROOT, locked
from target import version

VENDOR = ROOT / "src" / "notso" / "web" / "static" / "vendor"
NPM_NAMES = {"htmx": "htmx.org", "hx": "htmx.org", "katex": "katex", "mermaid": "mermaid"}


def bill() -> dict[str, Any]:
    """Return the document. It is reproducible, because it contains no time or random serial number."""
    packages = locked(ROOT / "supply" / "run.txt")
    root = f"pkg:pypi/{OURS}@{version()}"
    components = [_package(name, pinned, sums) for name, (pinned, sums) in sorted(packages.items())]
    components += [_file(*row) for row in vendored()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": OURS,
                "version": version(),
                "purl": root,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": sorted(each["bom-ref"] for each in components)}],
    }


def vendored() -> list[tuple[str, str, str, str]]:
    """Return (file, version, license, SHA-256) of each third-party file of the page."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| ([0-9a-f]{64}) \|$", (VENDOR / "VENDORED.md").read_text(), re.M)
    for name, _, _, promised in rows:
        if hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() != promised:
            raise SystemExit(f"{name} does not have the SHA-256 in VENDORED.md")
    return rows


def _package(name: str, pinned: str, sums: tuple[str, ...]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{pinned}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": pinned,
        "purl": purl,
        "licenses": [{"license": {"name": license_of(importlib.metadata.distribution(name))}}],
        # A package has no single hash: each is of one archive, such as the wheel for an architecture.
        "properties": [{"name": "notso:archive:sha256", "value": value} for value in sorted(sums)],
    }


def _file(name: str, released: str, license: str, sha256: str) -> dict[str, Any]:
    package = NPM_NAMES[re.split(r"[/.-]", name)[0]]
    return {
        "type": "file",
        "bom-ref": f"pkg:npm/{package}@{released}#{name}",
        "name": name,
        "version": released,
        "purl": f"pkg:npm/{package}@{released}#{name}",
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "licenses": [{"license": {"id": license}}],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(bill(), indent=1) + "\n")
    print(f"{target}: {len(bill()['components'])} components")
