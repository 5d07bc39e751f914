"""benchmarks/cuda_bits.py, the first script to run on a GPU, finds differences on the stub driver and reports them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from stub_gpu.gpu import installed

from notso.qtensor import CUDA, FORMATS_BY_NAME

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cuda_bits.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_bits", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long("native", "engine")
def test_cuda_bits_finds_no_difference_on_stub_driver(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(script, "ROUNDS", 1)
    with installed():
        assert script.main(["--json", str(tmp_path / "bits.json")]) == 0
        assert script.answers("cuda", None)["differ"] == []
    result = json.loads((tmp_path / "bits.json").read_text())
    assert result["differ"] == [] and set(result["formats"]) == set(FORMATS_BY_NAME)


def test_cuda_bits_reports_a_flipped_bit(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = CUDA.download

    def wrong(self: CUDA, array: Any) -> Any:
        values = right(self, array)
        values.reshape(-1).view(np.uint8)[0] ^= 1
        return values

    monkeypatch.setattr(CUDA, "download", wrong)
    with installed():
        assert script.main(["--small"]) == 1
    assert "Q6_K of 33 rows" in json.loads(capsys.readouterr().out)["differ"]
