"""Run `notso bench` with each peer (another engine to compare with), and store the results as JSON.

    python benchmarks/peers.py build/synth-3b.gguf --peers llama.cpp openvino --repeat 7

NOTSO_PEER_PYTHON_LLAMA_CPP and NOTSO_PEER_PYTHON_OPENVINO are the Python interpreters of the peers; NOTSO_PEER_PYTHON
is the default of both. Arguments after `--` are passed to `notso bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from notso.qtensor import kernel_choice

RESULTS = Path(__file__).parent / "results"
USUAL = [
    *("--prefill=512", "--prefill=8192", "--depth=0", "--depth=4096", "--batch=1", "--batch=4", "--batch=16"),
    *("--decode=32", "--weights=packed"),
]


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peers", nargs="*", default=["llama.cpp", "openvino"])
    parser.add_argument("--kernels", default="", help="force a kernel family")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--name", default="", help="suffix of the result file's name")
    given = parser.parse_args(sys.argv[1:split])
    options = sys.argv[split + 1 :] or USUAL
    RESULTS.mkdir(parents=True, exist_ok=True)
    for peer in given.peers or [""]:
        command = [sys.executable, "-m", "notso", "bench", str(given.file), "--json", f"--repeat={given.repeat}"]
        command += [*options, *([f"--compare={peer}"] if peer else [])]
        own = os.environ.get("NOTSO_PEER_PYTHON_" + peer.replace(".", "_").upper(), "")
        env = {**os.environ, **({"NOTSO_PEER_PYTHON": own} if own else {})}
        if given.kernels:
            env[kernel_choice.KERNELS_VARIABLE] = given.kernels
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            sys.exit(run.returncode)
        name = "-".join(part for part in (peer.replace(".", "-") or "alone", given.kernels, given.name) if part)
        kept = RESULTS / f"{name}.json"
        kept.write_text(json.dumps(json.loads(run.stdout), indent=1) + "\n")
        print(f"results written to {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
