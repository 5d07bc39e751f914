"""Settings of PEFT adapters: each is computed, has no effect on inference, or is rejected with an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.adapters import random_pairs, write_gguf, write_peft
from golden.peft_cases import BASE, COMPUTED, REFUSED, Case

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError
from notso.smollm3.model import lora
from notso.smollm3.model.lora import PeftConfig, read_adapter

FIELDS = {
    **dict.fromkeys(lora.COMPUTED, "computed"),
    **dict.fromkeys(lora.HARMLESS, "harmless"),
    **dict.fromkeys(lora.REFUSED, "refused"),
    **dict.fromkeys(lora.CHOICES, "by value"),
}

FROZEN = {
    "computed": "alpha_pattern exclude_modules layers_pattern layers_to_transform lora_alpha r rank_pattern "
    "target_modules use_rslora",
    "harmless": "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config fan_in_fan_out "
    "inference_mode loftq_config lora_dropout lora_ga_config megatron_core monteclora_config peft_version "
    "qalora_group_size revision runtime_config velora_config",
    "refused": "alora_invocation_tokens arrow_config kasa_config layer_replication lora_bias megatron_config "
    "modules_to_save target_parameters trainable_token_indices use_bdlora use_dora use_qalora",
    "by value": "bias init_lora_weights peft_type task_type",
}
"""The fields of PEFT 0.21.2's LoraConfig; `test_peft_settings.py` compares them with the installed one."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SmolLM3Config:
    with GGUFFile.open(BASE.write(tmp_path_factory.mktemp("base") / "base.gguf")) as file:
        return SmolLM3Config.from_metadata(file.metadata)


def test_every_lora_config_field_has_one_classification() -> None:
    found = {verdict: " ".join(sorted(name for name in FIELDS if FIELDS[name] == verdict)) for verdict in FROZEN}
    assert found == FROZEN
    assert len(FIELDS) == sum(len(names.split()) for names in FROZEN.values()), "a field is in two groups"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_unsupported_peft_setting_is_rejected_by_name(tmp_path: Path, config: SmolLM3Config, case: Case) -> None:
    with pytest.raises(ModelFileError, match=case.refused):
        read_adapter("a", case.write(tmp_path / "a", config), config)


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_supported_peft_setting_is_read(tmp_path: Path, config: SmolLM3Config, case: Case) -> None:
    assert read_adapter("a", case.write(tmp_path / "a", config), config).rank


def test_tensors_excluded_by_peft_settings_are_not_applied(
    tmp_path: Path, config: SmolLM3Config, caplog: pytest.LogCaptureFixture
) -> None:
    cases = {case.name: case for case in COMPUTED}

    def adapted(name: str) -> set[tuple[int, str]]:
        read = read_adapter("a", cases[name].write(tmp_path / name, config), config)
        return {(number, role) for number, layer in enumerate(read.layers) for role in layer}

    everything = adapted("plain")
    assert not caplog.records
    assert adapted("few targets") == {place for place in everything if place[1] in ("v_proj", "gate_proj")}
    assert "40 tensors belong to modules excluded by its adapter_config.json" in caplog.text
    assert adapted("one layer") == {place for place in everything if place[0] == 2}
    assert adapted("some layers") == {place for place in everything if place[0] in (0, 3)}
    assert adapted("whole names") == {(1, "q_proj"), (3, "up_proj")}
    assert adapted("layers beside a whole name") == {(1, "v_proj"), (0, "up_proj")}
    assert everything - adapted("excluded names") == {(n, "q_proj") for n in range(4)} | {(2, "up_proj")}
    assert adapted("expression of some") == {(n, role) for n in (0, 2) for role in ("up_proj", "down_proj")}


def test_rank_and_alpha_patterns_apply_per_module(tmp_path: Path, config: SmolLM3Config) -> None:
    """Patterns that set the values of another adapter give the same adapter."""
    pairs = random_pairs(config, 1, rank=4)
    targets = {"target_modules": ["q_proj", "up_proj"]}
    of_all = write_peft(tmp_path / "all", pairs, config.head_dim, alpha=6.0, use_rslora=True, **targets)
    by_name = write_peft(
        tmp_path / "named", pairs, config.head_dim, alpha=1.0, use_rslora=True, r=9,
        rank_pattern={".*proj": 4, "q_proj": 99}, alpha_pattern={r"self_attn\.q_proj": 6, "up_proj": 6.0}, **targets,
    )  # fmt: skip
    assert read_adapter("a", of_all, config).digest == read_adapter("a", by_name, config).digest
    scale = PeftConfig.parse((by_name / "adapter_config.json").read_bytes()).scale
    assert scale("model.layers.0.mlp.up_proj") == 3.0 and scale("model.layers.0.mlp.down_proj") == 0.5


def test_peft_expression_is_matched_in_linear_time(config: SmolLM3Config) -> None:
    """Python's own `re` takes exponential time for these expressions."""
    hostile = {"target_modules": r"(\w|\w|\.)*!", "rank_pattern": {r"((\w+)+\.)+!": 2}, "r": 8, "lora_alpha": 8}
    read = PeftConfig.parse(json.dumps({"peft_type": "LORA", **hostile}).encode())
    assert not read.adapts("model.layers.0.self_attn.q_proj" * 4, 0)
    assert read.rank("model.layers.0.self_attn.q_proj" * 4) == 8


def test_unknown_gguf_adapter_key_is_rejected(tmp_path: Path, config: SmolLM3Config) -> None:
    pairs = random_pairs(config, 1)
    known = write_gguf(tmp_path / "known.gguf", pairs, adapter__lora__task_name="sums")
    assert read_adapter("a", known, config).rank == 8
    with pytest.raises(ModelFileError, match=r"'adapter\.lora\.gate': unknown setting"):
        read_adapter("a", write_gguf(tmp_path / "new.gguf", pairs, adapter__lora__gate="yes"), config)


def test_training_only_tensors_are_ignored(tmp_path: Path, config: SmolLM3Config) -> None:
    folder = write_peft(tmp_path / "a", random_pairs(config, 1), config.head_dim)
    plain = read_adapter("a", folder, config).digest
    weights = folder / "adapter_model.safetensors"
    raw = weights.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for number, name in enumerate(("velora_embed", "monteclora_sampler.std")):
        place = [len(body) + 8 * number, len(body) + 8 * (number + 1)]
        tensor = {"dtype": "F32", "shape": [2], "data_offsets": place}
        header[f"base_model.model.model.layers.0.mlp.up_proj.lora_{name}"] = tensor
    head = json.dumps(header).encode()
    weights.write_bytes(len(head).to_bytes(8, "little") + head + body + bytes(16))
    assert read_adapter("a", folder, config).digest == plain
