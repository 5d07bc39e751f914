"""Unusual folders are computed as transformers does or rejected with an error, never read partially.
`tests/smollm3/tuning/test_folders.py` compares the same folders with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from architecture.test_growth import check_growth
from golden.folder_cases import BASE, COMPUTED, REFUSED, FolderCase
from smollm3.conversion.hf_folder_of import config_of, write_folder

from notso.qtensor import GGUFFile
from notso.smollm3 import Engine, ModelFileError, SamplingParams
from notso.smollm3.config import ARCHITECTURE, SmolLM3Config
from notso.smollm3.conversion.converter import convert
from notso.smollm3.conversion.hf_config import config_entries
from notso.smollm3.conversion.hf_tokenizer import PROBES, folder_tokenizer
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.tokenizer_pipeline import EXPRESSIONS, LLAMA_3, PIPELINE_KEY, QWEN_2

Json = dict[str, Any]

ROTATIONS = {
    "YaRN, plain": (1.138629, 0.238339, 0.0224505, 0.00326479),
    "YaRN, attention_factor": (0.7, 0.238339, 0.0224505, 0.00326479),
    "YaRN, attention_factor of nothing": (1.138629, 0.238339, 0.0224505, 0.00326479),
    "YaRN, beta_fast": (1.138629, 0.381342, 0.0224505, 0.00326479),
    "YaRN, beta_slow": (1.138629, 0.299626, 0.0416938, 0.00326479),
    "YaRN, both betas and no truncation": (1.138629, 0.262545, 0.0224505, 0.00326479),
    "YaRN, truncate null": (1.138629, 0.211962, 0.0224505, 0.00326479),
    "YaRN, betas that leave no ramp": (1.138629, 0.0953354, 0.0224505, 0.00326479),
    "YaRN, betas the wrong way round": (1.138629, 0.190671, 0.089802, 0.0130591),
    "YaRN, mscale": (1.129643, 0.238339, 0.0224505, 0.00326479),
    "YaRN, mscale alone": (1.138629, 0.238339, 0.0224505, 0.00326479),
    "YaRN, attention_factor beside mscale": (1.25, 0.238339, 0.0224505, 0.00326479),
    "YaRN, factor null": (1.138629, 0.238339, 0.0224505, 0.00326479),
    "YaRN, factor 1": (0.8, 0.381342, 0.089802, 0.0130591),
    "YaRN, no original length": (1.138629, 0.299626, 0.0416938, 0.00326479),
    "YaRN of older folders": (1.138629, 0.238339, 0.0224505, 0.00326479),
    "both names of the scaling": (1.069315, 0.305073, 0.044901, 0.00652957),
    "an original length outside": (1.138629, 0.266939, 0.0224505, 0.00326479),
}
"""Case -> transformers' attention factor, and its frequencies of pairs 2, 5 and 9."""


def converted(case: FolderCase, tmp_path: Path) -> GGUFFile:
    convert(case.write(tmp_path / "folder"), tmp_path / "made.gguf", "F32")
    return GGUFFile.open(tmp_path / "made.gguf")


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_rope_and_tensors_of_supported_folders_match_transformers(tmp_path: Path, case: FolderCase) -> None:
    with converted(case, tmp_path) as file:
        frequencies, factor = SmolLM3Config.from_metadata(file.metadata).rope_frequencies(128)
        if case.name in ROTATIONS:
            np.testing.assert_allclose([factor, *(frequencies[i] for i in (2, 5, 9))], ROTATIONS[case.name], rtol=1e-5)
        else:
            assert factor == 1.0
        expected = dict(case.model.weights())["token_embd.weight"]
        embedding = file.tensors["token_embd.weight"].as_float32()
        has_head = "another head" in case.name or case.name == "untied"
        assert ("output.weight" in file.tensors) == (has_head or "not tied" in case.name)
        assert np.array_equal(embedding, np.roll(expected, 1, 0) if case.name == "a head alone" else expected)
        if "another head" in case.name:
            assert np.array_equal(file.tensors["output.weight"].as_float32(), np.roll(expected, 1, 0))


@pytest.mark.parametrize("case", [each for each in COMPUTED if each.name in ROTATIONS], ids=lambda case: case.name)
def test_rotation_of_every_supported_config(case: FolderCase) -> None:
    """Without writing weights, which takes most of the time of the test above."""
    entries = {key: value for key, (value, _) in config_entries(config_of(case.model) | case.config).items()}
    entries |= {"general.architecture": ARCHITECTURE, "tokenizer.ggml.tokens": ["a"] * case.model.vocab}
    frequencies, factor = SmolLM3Config.from_metadata(entries).rope_frequencies(128)
    np.testing.assert_allclose([factor, *(frequencies[i] for i in (2, 5, 9))], ROTATIONS[case.name], rtol=1e-5)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_unsupported_folders_are_refused_by_name(tmp_path: Path, case: FolderCase) -> None:
    with pytest.raises(ModelFileError, match=case.refused):
        converted(case, tmp_path)
    assert not (tmp_path / "made.gguf").exists()


def test_end_ids_of_every_config_file_end_an_answer(tmp_path: Path) -> None:
    """End ids are those of config.json, generation_config.json and tokenizer_config.json, special tokens or not."""
    folder = write_folder(BASE, tmp_path / "folder", eos_token_id=[265, 266])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [270, 271, 266, 272]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": None}))
    convert(folder, tmp_path / "made.gguf", "F32")
    with Engine.load(tmp_path / "made.gguf", context_tokens=64, threads=1) as engine:
        assert engine.tokenizer.end_ids >= {258, 265, 266, 270, 271, 272}
        for token, reason in ((265, "stop"), (272, "stop"), (273, "length")):
            always = SamplingParams(max_tokens=8, temperature=0, logit_bias={token: 100.0})
            assert list(engine.submit([1, 2, 3], always).events())[-1].finish_reason == reason
    with GGUFFile.open(tmp_path / "made.gguf") as file:
        assert file.metadata["tokenizer.ggml.eos_token_id"] == 258
        assert file.metadata["tokenizer.ggml.eot_token_id"] == 270


# ---------------------------------------------------------------- tokenizers

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT_2 = BYTES | {"use_regex": True}


def cut_by(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def split(expression: str, behavior: str = "Isolated") -> Json:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": False}


def model(**fields: Any) -> Callable[[Json], Json]:
    return lambda content: {"model": content["model"] | fields}


def added(**flags: Any) -> Callable[[Json], Json]:
    """Change flags of the first added token."""
    return lambda content: {"added_tokens": [content["added_tokens"][0] | flags, *content["added_tokens"][1:]]}


TAKEN: dict[str, Json | Callable[[Json], Json]] = {
    "as it is": {},
    "transformers' ordinary ByteLevel": {"pre_tokenizer": GPT_2},
    "a space in front": {"pre_tokenizer": GPT_2 | {"add_prefix_space": True}},
    "Qwen 2": {"pre_tokenizer": cut_by(split(QWEN_2), BYTES), "normalizer": {"type": "NFC"}},
    "SmolLM 2": {"pre_tokenizer": cut_by({"type": "Digits", "individual_digits": True}, GPT_2)},
    "whole numbers": {"pre_tokenizer": cut_by({"type": "Digits", "individual_digits": False}, BYTES)},
    "DeepSeek": {"pre_tokenizer": cut_by(split(r"\p{N}{1,3}"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), BYTES)},
    "a string": {"pre_tokenizer": cut_by(split(LLAMA_3) | {"pattern": {"String": "e"}}, BYTES)},
    "punctuation": {"pre_tokenizer": cut_by({"type": "Punctuation", "behavior": "Contiguous"}, BYTES)},
    "NFC": {"normalizer": {"type": "NFC"}},
    "NFKC": {"normalizer": {"type": "NFKC"}},
    "NFD and small letters": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]},
    },
    "something in front": {"normalizer": {"type": "Prepend", "prepend": "_"}},
    "merges go first": model(ignore_merges=False),
    "an unknown token that is never needed": model(unk_token="<|end_of_text|>", fuse_unk=True),
    "bytes that are never needed": model(byte_fallback=True),
    "merges as text": lambda content: {
        "model": content["model"] | {"merges": [" ".join(pair) for pair in content["model"]["merges"]]}
    },
    "truncation and padding, which no prompt has": {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<pad>"},
    },
    "a template of nothing": {"post_processor": {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }},
    "a normalized token": added(normalized=True),
}  # fmt: skip

NOT_TAKEN: dict[str, tuple[Json | Callable[[Json], Json], str]] = {
    "dropout": (model(dropout=0.1), "dropout is 0.1"),
    "a suffix": (model(end_of_word_suffix="</w>"), "end_of_word_suffix is '</w>'"),
    "a prefix": (model(continuing_subword_prefix="##"), "continuing_subword_prefix is '##'"),
    "another kind": (model(type="Unigram"), "its model is 'Unigram', not BPE"),
    "a field of tomorrow": (model(rank=1), "its model: 'rank' is not supported"),
    "an expression of nobody": ({"pre_tokenizer": cut_by(split(r"(\w+)+$"), BYTES)}, "splits by .* not a supported"),
    "no bytes": ({"pre_tokenizer": {"type": "Whitespace"}}, "'Whitespace' does not end with ByteLevel"),
    "no cut": ({"pre_tokenizer": None}, "None does not end with ByteLevel"),
    "a normalizer that strips": ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "'Strip'"),
    "a normalizer that replaces": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}}, "'Replace' is not supported"),
    "space left of a token": (added(lstrip=True), "lstrip is not supported"),
    "space right of a token": (added(rstrip=True), "rstrip is not supported"),
    "a token as a word": (added(single_word=True), "single_word is not supported"),
    "a token in front": (
        {"post_processor": {
            "type": "TemplateProcessing", "pair": [],
            "special_tokens": {"<think>": {"id": "<think>", "ids": [8], "tokens": ["<think>"]}},
            "single": [{"SpecialToken": {"id": "<think>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        }}, "may add tokens, which is not supported"),
    "another decoder": (
        {"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}, "'Metaspace' is not Byte"),
    "a part of tomorrow": ({"chunker": {"type": "New"}}, "'chunker' is not supported"),
}  # fmt: skip

CONFIGS: dict[str, tuple[Json, str]] = {
    "a token of its own": ({"eos_token": "<|done|>"}, "eos_token '<|done|>' is not a token of tokenizer.json"),
    "more tokens": ({"extra_special_tokens": ["<|a|>"]}, "extra_special_tokens '<|a|>' is not a token"),
    "a start": ({"add_bos_token": True}, "'add_bos_token' is True"),
    "a space": ({"add_prefix_space": True}, "'add_prefix_space' is True"),
    "another class": ({"tokenizer_class": "Qwen2Tokenizer"}, "tokenizer_class is 'Qwen2Tokenizer'"),
    "an id of its own": ({"added_tokens_decoder": {"7": {"content": "<think>"}}}, "gives '<think>' the id '7'"),
    "a flag of its own": (
        {"added_tokens_decoder": {"6": {"content": "<think>", "rstrip": True}}}, "rstrip of '<think>' differs"),
    "specials in pieces": ({"split_special_tokens": True}, "'split_special_tokens' is True"),
    "a template for tools": (
        {"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]}, "tool_use"),
}  # fmt: skip


def write(folder: Path, content: Json, edit: Json | Callable[[Json], Json] = {}, config: Json | None = None) -> Path:  # noqa: B006
    (folder / "tokenizer.json").write_text(json.dumps(content | (edit(content) if callable(edit) else edit)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", TAKEN)
def test_token_ids_match_the_tokenizers_library(tmp_path: Path, small_json: Json, name: str) -> None:
    folder = write(tmp_path, small_json, TAKEN[name])
    entries = {key: value for key, (value, _) in folder_tokenizer(folder, 1300, []).items()}
    ours, theirs = Tokenizer.from_gguf(entries), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    source = Path(__file__).read_text()
    for text in (
        *PROBES,
        *source.splitlines(),
        source,
        "<|im_start|>user\ne\u0301 12345<|im_end|>\n<think>Ａ x</think>",
    ):
        assert ours.encode(text, control=True) == theirs.encode(text).ids, text


def test_tokenizer_cases_give_distinct_ids(tmp_path: Path, small_json: Json) -> None:
    """Without this check, the test above would compare equal tokenizers."""
    ids = set()
    for number, name in enumerate(TAKEN):
        (tmp_path / str(number)).mkdir()
        entries = folder_tokenizer(write(tmp_path / str(number), small_json, TAKEN[name]), 1300, [])
        ours = Tokenizer.from_gguf({key: value for key, (value, _) in entries.items()})
        ids.add(tuple(tuple(ours.encode(text)) for text in PROBES))
    assert len(ids) >= 12


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_unsupported_tokenizer_is_refused_by_name(tmp_path: Path, small_json: Json, name: str) -> None:
    edit, words = NOT_TAKEN[name]
    with pytest.raises(ModelFileError, match=words):
        folder_tokenizer(write(tmp_path, small_json, edit), 1300, [])


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_tokenizer_config_is_refused_by_name(tmp_path: Path, small_json: Json, name: str) -> None:
    config, words = CONFIGS[name]
    with pytest.raises(ModelFileError, match=words.replace("|", r"\|")):
        folder_tokenizer(write(tmp_path, small_json, config=config), 1300, [])


def test_special_tokens_of_tokenizer_config_are_control_tokens(tmp_path: Path, small_json: Json) -> None:
    config = {
        "bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>", "pad_token": None,
        "additional_special_tokens": ["<code>"], "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192, "clean_up_tokenization_spaces": True,
    }  # fmt: skip
    plain = [token | {"special": token["content"].startswith("<|")} for token in small_json["added_tokens"]]
    entries = folder_tokenizer(write(tmp_path, small_json, {"added_tokens": plain}, config), 1300, [5])
    ids = {text: index for index, text in enumerate(entries["tokenizer.ggml.tokens"][0])}
    assert entries["tokenizer.ggml.bos_token_id"] == (ids["<|begin_of_text|>"], "uint32")
    assert entries["tokenizer.ggml.eos_token_id"] == (ids["<|eot_id|>"], "uint32")
    assert "tokenizer.ggml.padding_token_id" not in entries
    kinds = entries["tokenizer.ggml.token_type"][0]
    assert kinds[ids["<code>"]] == kinds[ids["<|begin_of_text|>"]] == 3
    assert kinds[ids["</code>"]] == 4


def test_metadata_names_the_pre_tokenizer_for_llama_cpp(tmp_path: Path, small_json: Json) -> None:
    """Without a name that llama.cpp knows, it rejects the file; our own metadata key contains the exact pipeline."""
    names = {}
    for number, (name, edit) in enumerate(TAKEN.items()):
        (tmp_path / str(number)).mkdir()
        entries = folder_tokenizer(write(tmp_path / str(number), small_json, edit), 1300, [])
        names[name] = entries["tokenizer.ggml.pre"][0], PIPELINE_KEY in entries
    assert names["as it is"] == ("smaug-bpe", False)
    assert names["merges go first"] == ("smaug-bpe", True)
    assert names["a space in front"] == ("notso", True)
    assert names["NFKC"] == ("smaug-bpe", True)


def test_invalid_pipeline_metadata_is_refused(small_metadata: Json) -> None:
    """Metadata of a GGUF file is untrusted."""
    hostile = {"normalizer": None, "pre_tokenizer": cut_by(split("(a+)+$"), BYTES), "ignore_merges": True}
    for kept in (json.dumps(hostile), "{", "[]", "[" * 100_000, 3):
        with pytest.raises(ModelFileError):
            Tokenizer.from_gguf(small_metadata | {PIPELINE_KEY: kept})


@pytest.mark.parametrize("expression", sorted(EXPRESSIONS))
def test_supported_split_expressions_take_linear_time(expression: str) -> None:
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
    for piece in (" ", "a", "A", "好", "\n ", "'", "'s", "1", "Aa", "!", " \t", "e\u0301", "\u0301"):

        def made(size: int, piece: str = piece) -> str:
            return piece * size + "\x00"

        check_growth(cut.pre_tokenize_str, made, (1000, 4000, 16_000))
