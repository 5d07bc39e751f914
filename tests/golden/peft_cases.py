"""Unusual adapter folders, and the expected result of each: computed as PEFT does, or rejected with an error.

`tests/smollm3/model/test_peft_config.py` checks the results without PEFT, and
`tests/smollm3/tuning/test_peft_settings.py` compares computed ones with the installed PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from golden.adapters import Pairs, random_pairs, write_peft
from golden.random_models import RANDOM

from notso.smollm3.config import SmolLM3Config
from notso.smollm3.model.weights import MATRICES

BASE = replace(RANDOM, layers=4, hidden=256, ffn=384, vocab=700)


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of an adapter for all matrices, with rank 8 except for the roles in `ranks`. `refused`: words of the
    error that names the setting, or "" if the adapter is accepted. `gone`: roles without tensors in the file."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    ranks: dict[str, int] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    def pairs(self, config: SmolLM3Config) -> Pairs:
        """Return the matrices of the file."""
        made: Pairs = {}
        for number, role in enumerate(role for role in MATRICES if role not in self.gone):
            made |= random_pairs(config, 40 + number, rank=self.ranks.get(role, 8), roles=(role,))
        return made

    def write(self, folder: Path, config: SmolLM3Config) -> Path:
        """Write and return the folder, in PEFT's format."""
        settings = {"target_modules": list(MATRICES), "init_lora_weights": True, "r": 8} | self.settings
        return write_peft(folder, self.pairs(config), config.head_dim, **settings)


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_WIDE = {"q_proj": 4, "down_proj": 16}

COMPUTED = [
    Case("plain"),
    Case("rank-stabilized", {"use_rslora": True}),
    Case("expression", {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"}),
    Case("expression of some", {"target_modules": r".*\.(0|2)\.mlp\.(?:up|down)_proj"}),
    Case("every linear layer", {"target_modules": "all-linear"}),
    Case("few targets", {"target_modules": ["v_proj", "gate_proj"]}),
    Case("whole names", {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.3.mlp.up_proj"]}),
    Case("excluded names", {"exclude_modules": ["q_proj", "layers.2.mlp.up_proj"]}),
    Case("excluded by expression", {"exclude_modules": r".*\.[12]\.self_attn\..*"}),
    Case("one layer", {"layers_to_transform": 2}),
    Case("some layers", {"layers_to_transform": [0, 3], "layers_pattern": "layers"}),
    Case("layers beside a whole name", {
        "target_modules": ["v_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1],
    }),
    Case("ranks", {"rank_pattern": {"q_proj": 4, r".*\.down_proj": 16}}, ranks=_WIDE),
    Case("alphas", {"alpha_pattern": {"mlp.up_proj": 3, r"^model\.layers\.0\.self_attn\.v_proj": 40.5}}),
    Case("ranks and alphas, rank-stabilized", {
        "rank_pattern": {"q_proj": 4, "down_proj": 16}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True,
    }, ranks=_WIDE),
    Case("drawn", {"init_lora_weights": False}),
    Case("gaussian", {"init_lora_weights": "gaussian"}),
    Case("orthogonal", {"init_lora_weights": "orthogonal"}),
    Case("EVA", {
        "init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "rank_pattern": {"q_proj": 4, "down_proj": 16},
        "alpha_pattern": {"q_proj": 8, "down_proj": 32},
    }, ranks=_WIDE),
    Case("MiCA", {"init_lora_weights": "mica"}),
    Case("LoRA-GA", {"init_lora_weights": "lora_ga", "lora_ga_config": {"direction": "ArB2r"}}),
    Case("VeLoRA", {"velora_config": {"num_groups": 8, "init_type": "random"}}),
    Case("MonteCLoRA", {"monteclora_config": {"num_samples": 2}}),
    Case("transposed, which linear layers are not", {"fan_in_fan_out": True}),
    Case("LoftQ's settings without it", {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}),
    Case("CorDA's settings without it", {"corda_config": {"corda_method": "ipm"}}),
    Case("dropout", {"lora_dropout": 0.5, "inference_mode": False, "task_type": None}),
    Case("tied weights", {"ensure_weight_tying": True}),
    Case("fewer tensors than targets", gone=("o_proj", "gate_proj")),
    Case("off", {
        "use_dora": False, "modules_to_save": None, "layer_replication": None, "alora_invocation_tokens": None,
        "use_qalora": False, "qalora_group_size": 16, "megatron_core": "megatron.core", "lora_bias": False,
        "peft_version": "0.21.2", "revision": None, "auto_mapping": None, "base_model_name_or_path": "somewhere",
        "trainable_token_indices": None, "target_parameters": None, "arrow_config": None, "kasa_config": None,
    }),
]  # fmt: skip

REFUSED = [
    Case("PiSSA", {"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' .* changes the base"),
    Case("fast PiSSA", {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4'"),
    Case("OLoRA", {"init_lora_weights": "olora"}, "init_lora_weights: 'olora'"),
    Case("CorDA", {"init_lora_weights": "corda"}, "init_lora_weights: 'corda'"),
    Case("LoftQ", {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "init_lora_weights: 'loftq'"),
    Case("an initialization of tomorrow", {"init_lora_weights": "new"}, "init_lora_weights: 'new' is not supported$"),
    Case("activated LoRA", {"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: activated LoRA"),
    Case("replicated layers", {"layer_replication": [[0, 3], [1, 4]]}, "layer_replication: layer replication"),
    Case("DoRA", {"use_dora": True}, "use_dora: DoRA"),
    Case("QALoRA", {"use_qalora": True}, "use_qalora: QALoRA"),
    Case("block-diagonal", {"use_bdlora": {"nblocks": 2}}, "use_bdlora: block-diagonal LoRA"),
    Case("Arrow", {"arrow_config": {"top_k": 2}}, "arrow_config: Arrow"),
    Case("KaSA", {"kasa_config": {"beta": 1e-4}}, "kasa_config: KaSA"),
    Case("Megatron", {"megatron_config": {"tensor_model_parallel_size": 1}}, "megatron_config: Megatron"),
    Case("biases", {"lora_bias": True}, "lora_bias: LoRA with biases"),
    Case("biases of the base", {"bias": "lora_only"}, "bias: 'lora_only' is not supported"),
    Case("whole modules", {"modules_to_save": ["lm_head"]}, "modules_to_save: replacing whole modules"),
    Case("trained tokens", {"trainable_token_indices": [3]}, "trainable_token_indices: training of single tokens"),
    Case("parameters", {"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters: LoRA on single parameters"),
    Case("another task", {"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS' is not supported"),
    Case("a setting of tomorrow", {"use_new_method": True}, "'use_new_method': unknown setting"),
    Case("another rank than the tensors", {"r": 16, "lora_alpha": 32}, r"rank 8, .* \(r, rank_pattern\) specifies 16"),
    Case("a rank for some, not in the tensors", {"rank_pattern": {"up_proj": 4}}, r"\(r, rank_pattern\) specifies 4"),
    Case("layers beside an expression", {"target_modules": ".*_proj", "layers_to_transform": [1]},
         "layers_to_transform and layers_pattern require a list"),
    Case("a pattern without layers", {"layers_pattern": "layers"}, "layers_pattern requires layers_to_transform"),
    Case(
        "a pattern with no layers",
        {"layers_pattern": "h", "layers_to_transform": []},
        "layers_pattern requires layers_to_transform",
    ),
    Case("nothing left", {"target_modules": ["c_attn"]}, "it has no tensors"),
    Case("layers of another name", {"layers_to_transform": [1], "layers_pattern": "h"}, "it has no tensors"),
    Case("an expression that takes exponential time", {"target_modules": r"(?=(a|a)*b).*"},
         "target_modules: the expression .* is not supported"),
    Case("sets of sets", {"target_modules": r".*[a-z&&[^q]]_proj"}, "target_modules: the expression"),
    Case("parentheses that others complete", {"target_modules": "a)|(.*_proj"}, "target_modules: the expression"),
    Case("a rank beside parentheses", {"rank_pattern": {"a)|(b": 4}}, r"rank_pattern: the expression 'a\)\|\(b'"),
    Case("a flag within an expression", {"alpha_pattern": {"(?i)Q_PROJ": 4}}, "alpha_pattern: the expression"),
    Case("a possessive quantifier", {"target_modules": r".*+_proj"}, "target_modules: the expression"),
    Case("word boundaries of Rust", {"target_modules": r".*\.\<q_proj\>"}, "target_modules: the expression"),
    Case("repeated repetition", {"target_modules": ".**_proj"}, "target_modules: the expression"),
    Case("contradicting flags", {"target_modules": "(?au).*_proj"}, "target_modules: the expression"),
    Case("a space in a count", {"target_modules": ".*_proj{ 1}"}, "target_modules: the expression"),
    Case("random numbers of missing tensors", {"init_lora_weights": False}, "q_proj: tensors are missing",
         gone=("q_proj",)),
]  # fmt: skip
