"""The AI SDK under Node: nine functions with each of three providers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLACE = Path(os.environ.get("NOTSO_AI_SDK", HERE.parents[2] / "build/npm-ai_sdk"))

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (PLACE / "node_modules").exists(), reason="npm is not installed, or could not install it"),
]


@pytest.mark.parametrize("provider", ["compatible", "openai", "anthropic"])
def test_nine_ai_sdk_functions_succeed_with_each_provider(scripted: str, provider: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "nine.mjs", PLACE)  # Node looks for modules beside the program
    ran = subprocess.run(
        ["node", "nine.mjs", provider, scripted], cwd=PLACE, capture_output=True, text=True, timeout=100
    )
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == 9, ran.stderr
    assert not [each for each in told if each["fault"] is not None]
