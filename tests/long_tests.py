"""Groups of tests that take minutes, which run only after changes to files that they depend on.

    python tests/long_tests.py             print the groups that are due, for LONG=
    python tests/long_tests.py --record    record that all groups (or those given as a,b) passed on the current files

A group's digest covers its files; tests/long_tests.json contains the digests with which it last passed. `make check`
runs and records the groups whose digest differs; `make test-long` runs and records all. So unchanged code is not tested
again, and changed code is always tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")

FORMATS_AND_DEVICES = (
    "tests/smollm3/engine/test_answers_across_devices.py",
    "tests/smollm3/engine/test_cuda_bits.py",
    "tests/smollm3/engine/test_device_choice.py",
    "tests/smollm3/model/test_backends.py",
    "tests/smollm3/model/test_every_format.py",
)
"""Tests of whole models on every device and in every format, due after changes to the kernels or the engine."""

GROUPS: dict[str, tuple[str, ...]] = {
    "native": (
        "native",
        "CMakeLists.txt",
        "tests/native",
        "tests/aarch64.py",
        "tests/architecture/test_native_headers.py",
        "tests/qtensor/test_sanitizers.py",
        "tests/qtensor/test_emulated_tiles.py",
        "tests/qtensor/test_neon_from_python.py",
        "tests/smollm3/engine/test_answers_on_aarch64.py",
        "tests/qtensor/test_cuda_machine_code.py",
        "tests/qtensor/test_cuda_nvrtc.py",
        "benchmarks/cuda_bits.py",
        "src/notso/qtensor/backends/cuda",
        "tests/qtensor/test_emulated_cuda.py",
        "tests/qtensor/test_kernels_attention_bytes.py",
        "tests/qtensor/test_kernels_matmul.py",
        "tests/qtensor/test_neon.py",
        *FORMATS_AND_DEVICES,
        "tests/stub_gpu",
    ),
    "engine": (
        "src/notso/qtensor",
        *(
            f"src/notso/smollm3/{room}"
            for room in ("engine", "kv", "model", "output", "sampling", "scheduling", "text")
        ),
        "src/notso/smollm3/diagnostics",
        "tests/smollm3/diagnostics/test_engine_meter.py",
        "tests/smollm3/diagnostics/test_goldens.py",
        "benchmarks/cuda_bits.py",
        *FORMATS_AND_DEVICES,
        "tests/smollm3/engine/test_engine_stress.py",
        "tests/smollm3/engine/test_library.py",
        "tests/smollm3/engine/test_memory_plan.py",
        "tests/smollm3/engine/test_one_generation.py",
        "tests/smollm3/engine/test_prefix_warmup.py",
        "tests/smollm3/engine/test_reread.py",
        "tests/smollm3/kv/test_conversation_log.py",
        "tests/smollm3/model/test_accuracy.py",
        "tests/smollm3/sampling/test_patterns.py",
        "tests/smollm3/sampling/test_token_limit.py",
        "tests/smollm3/scheduling/test_scheduler.py",
        "tests/smollm3/text/test_tokenizer_official.py",
    ),
    "quotes": (
        "src/notso/documents/citations.py",
        "src/notso/smollm3/sampling/quote_index.py",
        "src/notso/smollm3/sampling/quote_index_child.py",
        "src/notso/smollm3/sampling/quote_index_files.py",
        "src/notso/smollm3/sampling/quoted_fields.py",
        "src/notso/smollm3/sampling/quotes.py",
        "tests/documents/test_citations.py",
        "tests/smollm3/sampling/test_quoted_fields.py",
        "tests/smollm3/sampling/test_quotes.py",
    ),
    "conversion": (
        "src/notso/qtensor",
        "src/notso/smollm3/conversion",
        "tests/smollm3/conversion",
    ),
    "store": (
        "src/notso/documents/passages.py",
        "src/notso/web/store",
        "tests/web/store/test_document_crash.py",
        "tests/web/store/test_documents.py",
    ),
    "chaos": (
        "deploy",
        "src/notso/cli",
        "src/notso/cluster",
        "src/notso/documents",
        "src/notso/plugins",
        "src/notso/system",
        "src/notso/web",
        "tests/chaos",
    ),
    "clients": (
        "constraints.txt",
        "src/notso/web/api",
        "tests/scripted_engine.py",
        "supply/clients.txt",
        "supply/clients-lm-eval.txt",
        "supply/clients-openai-2.txt",
        "tests/clients",
    ),
    "tune": (
        "src/notso/cli/tune.py",
        "src/notso/smollm3/tuning",
        "src/notso/web/chat/files/quoting_rows.py",
        "supply/tune.txt",
        "tests/smollm3/tuning",
    ),
    "ray": (
        "src/notso/cli/cluster.py",
        "src/notso/cluster",
        "supply/ray.txt",
        "tests/cluster",
    ),
    "programs": (
        "src/notso/smollm3/output",
        "src/notso/smollm3/sampling",
        "src/notso/smollm3/text",
        "src/notso/web/api",
        "tests/strangers",
    ),
    "page": (
        "src/notso/documents",
        "src/notso/web",
        "tests/browser",
        "tests/web/rendering/test_rendering.py",
    ),
    "docs": (
        "README.md",
        "docs",
        "src/notso/cli",
        "src/notso/plugins",
        "src/notso/web/api",
        "src/notso/web/values",
        "tests/test_documented_blocks.py",
    ),
    "plants": (
        "src/notso/cli",
        "src/notso/smollm3/values",
        "src/notso/web/api",
        "src/notso/web/chat",
        "src/notso/web/edge",
        "src/notso/web/values",
        "supply/plant.py",
        "supply/routes.py",
        "tests/architecture/test_plants.py",
        "tests/smollm3/engine/test_library.py",
    ),
}
"""Group -> files and folders that its tests depend on."""

APART = {"clients", "ray", "tune"}
"""Groups that run in separate environments, and are skipped if these cannot be installed. They are recorded only by
`make test-long`."""


def is_long(group: str) -> bool:
    """Return whether LONG selects this group."""
    return bool({group, "all"} & {*os.environ.get("LONG", "").split(",")})


def digest(group: str) -> str:
    """Return a digest of the names and contents of a group's files."""
    found = hashlib.sha256()
    for name in GROUPS[group]:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0{len(file.read_bytes())}\0".encode() + file.read_bytes())
    return found.hexdigest()


def due() -> list[str]:
    """Return the groups with changes since they last passed."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return [group for group in GROUPS if recorded.get(group) != digest(group)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        passed = {*sys.argv[2].split(",")} - APART if sys.argv[2:] else {*GROUPS}
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known |= {group: digest(group) for group in GROUPS if group in passed}
        RECORD.write_text(json.dumps({group: known[group] for group in GROUPS if group in known}, indent=1) + "\n")
    else:
        sys.stdout.write(",".join(due()) + "\n")
