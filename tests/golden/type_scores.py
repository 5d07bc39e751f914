"""Score the demo model's own answers with weights in each block type, quantized by llama.cpp: ours and llama.cpp's.

    python tests/golden/type_scores.py [TYPE ...] [--out benchmarks/results/type-scores.json]

llama-cpp-python must be installed here, or in the Python that NOTSO_ORACLE_PYTHON names. Takes several minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import live
from golden.dequantized import write_dequantized
from golden.store import Golden

from notso import Engine
from notso.qtensor.formats import FORMATS
from notso.smollm3.hub.registry import demo_path

TYPES = [format.name for format in FORMATS.values() if not format.is_float]

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TypeScore:
    """Scores over the answers of twenty chats; each position counts once.

    exact, ours, theirs: mean negative log probability of the text's tokens, in nats, with float arithmetic on the
    file's values, with our kernels, and with llama.cpp's. ours_kl, theirs_kl: mean KL divergence from the exact
    results.
    """

    type: str
    tokens: int
    exact: float
    ours: float
    theirs: float
    ours_kl: float
    theirs_kl: float


def score(name: str, folder: Path) -> TypeScore:
    """Create the file of a type in `folder` and score it with both. Raises RuntimeError if llama.cpp fails."""
    floats = folder / "demo-f32.gguf"
    if not floats.exists():
        write_dequantized(demo_path(), floats)
    file, exact_file = folder / f"demo-{name}.gguf", folder / f"demo-{name}-f32.gguf"
    live.make_file(floats, file, name)
    write_dequantized(file, exact_file)
    chats = Golden.load("demo_q4_k_m")
    theirs = live.ask("llama_cpp", file, chats.lists).logits
    with Engine.load(file, kv="f16", threads=1) as engine:
        ours = np.concatenate([engine.logits(ids) for ids in chats.lists])
    with Engine.load(exact_file, kv="f16", threads=1) as engine:
        exact = np.concatenate([engine.logits(ids) for ids in chats.lists])
    for made in (file, exact_file):
        made.unlink()
    ids = np.concatenate([[*chat[1:], -1] for chat in chats.lists])  # the next token, or -1 at a chat's end
    answers = [
        np.arange(len(chat)) >= int(start) - 1 for chat, start in zip(chats.lists, chats.prompt_lengths, strict=True)
    ]
    counted = np.concatenate(answers) & chats.first_seen & (ids >= 0)
    found = [_log_softmax(logits[counted]) for logits in (exact, ours, theirs)]
    own = [-float(logs[np.arange(counted.sum()), ids[counted]].mean()) for logs in found]
    far = [float((np.exp(found[0]) * (found[0] - logs)).sum(axis=1).mean()) for logs in found[1:]]
    return TypeScore(name, int(counted.sum()), *own, *far)


def _log_softmax(logits: npt.NDArray[np.float32]) -> Doubles:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if (library := live.versions("llama_cpp")) is None:
        sys.exit(live.why_missing("llama_cpp"))
    scores = []
    with TemporaryDirectory() as folder:
        for name in options.types:
            scores.append(score(name, Path(folder)))
            print(json.dumps(asdict(scores[-1])), flush=True)
    if options.out is not None:
        result = {"date": time.strftime("%Y-%m-%d"), "library": library, "type_scores": [asdict(s) for s in scores]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
