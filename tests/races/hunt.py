"""Search for race conditions: `make races`, or

    python tests/races/hunt.py [--runs 20] [pytest arguments]

Run the tests of multithreaded code repeatedly, each time with other forced delays (`sitecustomize.py`) and with a
CPU-bound process per core. Print the failed tests with the seed that reproduces the delays; exit with 1 if any
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/web", "tests/chaos", "tests/cli", "tests/smollm3/engine", "tests/smollm3/output", "tests/smollm3/kv")
LOAD = "while True: sum(range(100_000))"


def failures(cache: Path) -> list[str]:
    file = ROOT / cache / "v" / "cache" / "lastfailed"
    return list(json.loads(file.read_text())) if file.exists() else []


def run(seed: int, arguments: list[str]) -> list[str]:
    """Run the tests with the delays of `seed`; return the names of those that failed."""
    cache = Path(".pytest_cache", f"races-{seed}")
    environment = {**os.environ, "LONG": "chaos", "FORCED_DELAYS": str(seed), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-o", f"cache_dir={cache}", "-o", "timeout=600"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    failed = failures(cache)
    if failed or done.returncode not in (0, 1):
        sys.stdout.write(done.stdout[-6000:] + done.stderr[-2000:])
    return failed or ([] if done.returncode == 0 else [f"pytest ended with {done.returncode}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    options, rest = parser.parse_known_args()
    load = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(os.cpu_count() or 1)]
    clean = 0
    try:
        for seed in range(options.first, options.first + options.runs):
            began = time.monotonic()
            failed = run(seed, rest or list(TESTS))
            clean += not failed
            print(f"seed {seed}: {', '.join(failed) or 'clean'} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        for each in load:
            each.kill()
    print(f"{clean} of {options.runs} runs clean")
    return int(clean < options.runs)


if __name__ == "__main__":
    sys.exit(main())
