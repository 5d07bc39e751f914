"""Configure normalization and pre-tokenization (splitting text before BPE) as a tokenizer.json or GGUF file specifies.

Only known parts are accepted, because ignoring an unknown part would change token ids, and an unknown regular
expression may take exponential time. The `tokenizers` library executes the parts.

This module also converts a Hugging Face `tokenizer.json` to GGUF entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from notso.smollm3.errors import ModelFileError, quoted
from notso.smollm3.text.vocabulary import CONTROL, NORMAL, USER_DEFINED
from notso.text_file import LFS_ADVICE, LFS_POINTER, NotTextError, read_regular, read_text

# Project-specific GGUF key for a pipeline in JSON. It is needed because `tokenizer.ggml.pre` can only name a
# pre-tokenizer of llama.cpp.
PIPELINE_KEY = "notso.tokenizer.pipeline"

# Value of `tokenizer.ggml.pre` for pipelines that have no name in llama.cpp. llama.cpp rejects files with this value.
NO_NAME = "notso"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN_3_5 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
# Accepted regular expressions. They have been reviewed and take linear time.
EXPRESSIONS = {
    *(LLAMA_3, QWEN_2, _QWEN_3_5, _DEEPSEEK_3, _GPT_2, _TEKKEN, _GPT_4O),
    *("[一-龥\u3040-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+", r" ?[^(\s|[.,!?…。，、।۔،])]+"),  # DeepSeek and BLOOM
    # cl100k_base, in two spellings
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # expressions for one kind of character, from DeepSeek, Falcon, StarCoder and others
    *(r"\p{N}{1,3}", r"\p{N}", r"\d{1,3}", r"\d", "[0-9][0-9][0-9]", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\p{N}+"),
}

_BEHAVIORS = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
# Upper bound on the factor by which normalizers reduce the number of bytes of a text. The largest factor found is 4,
# for bold letters that become ASCII.
SHRINKS = 8


def _byte_level(expression: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": expression}


def _split(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level()]}


@dataclass(frozen=True, slots=True)
class TokenizerPipeline:
    """Normalizer and pre-tokenizer of a model."""

    pre_tokenizer: Mapping[str, Any]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = True  # whether a piece of text that equals a token becomes that token without merges

    @classmethod
    def from_json(cls, content: Any) -> TokenizerPipeline:
        """Parse a tokenizer.json. Raises ModelFileError."""
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ModelFileError("not a byte-level BPE tokenizer.json: there is no model")
        _require_known_keys(content, "tokenizer.json", _OTHER_KEYS | {"normalizer", "pre_tokenizer", "model"})
        _check_model(content["model"])
        _check_added(content.get("added_tokens"), content.get("normalizer"))
        _check_post_processor(content.get("post_processor"))
        _check_decoder(content.get("decoder"))
        return cls._checked(content.get("normalizer"), content.get("pre_tokenizer"), content["model"])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> TokenizerPipeline:
        """Read PIPELINE_KEY or, if absent, `tokenizer.ggml.pre`. Raises ModelFileError."""
        stored, name = metadata.get(PIPELINE_KEY), metadata.get("tokenizer.ggml.pre")
        if stored is None:
            if not isinstance(name, str) or name not in PRE_TOKENIZERS:
                raise ModelFileError(f"tokenizer.ggml.pre is {quoted(name)}; supported: {', '.join(PRE_TOKENIZERS)}")
            # ignore_merges keeps its default, True, as in SmolLM3's tokenizer.json.
            return cls(_split(PRE_TOKENIZERS[name]))
        try:
            content = json.loads(stored)
            return cls._checked(content["normalizer"], content["pre_tokenizer"], content)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ModelFileError(f"{PIPELINE_KEY} is not a valid tokenizer in JSON") from None

    @classmethod
    def _checked(cls, normalizer: Any, pre_tokenizer: Any, flags: Mapping[str, Any]) -> TokenizerPipeline:
        _check_normalizer(normalizer)
        _check_pre_tokenizer(pre_tokenizer)
        return cls(pre_tokenizer, normalizer, flags.get("ignore_merges", False) is True)

    def entries(self) -> dict[str, str]:
        known = next((name for name, each in _NAMED if each == self._canonical_form()), NO_NAME)
        found = {"tokenizer.ggml.pre": known}
        if self.normalizer is not None or known not in PRE_TOKENIZERS or not self.ignore_merges:
            found[PIPELINE_KEY] = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return found

    def encoder(self, ordinary: dict[str, int], merges: list[Any], merges_name: str) -> tokenizers.Tokenizer:
        """Return an encoder without special tokens. Raises ModelFileError."""
        parts: dict[str, Any] = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
        parts |= {"normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer}
        try:
            parsed = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0"} | parts))
            # The vocabulary and merges are passed as objects, because parsing JSON would take 1.5 times as long.
            encoder = tokenizers.Tokenizer(models.BPE(ordinary, merges, ignore_merges=self.ignore_merges))
        except Exception as error:  # the library raises no more specific exception
            raise ModelFileError(f"{merges_name} does not match the vocabulary: {error}") from error
        if self.normalizer is not None:
            encoder.normalizer = parsed.normalizer
        encoder.pre_tokenizer = parsed.pre_tokenizer
        return encoder

    def _canonical_form(self) -> tuple[Any, bool]:
        canonical: Any = json.loads(json.dumps(self.pre_tokenizer))
        for each in (canonical, *canonical.get("pretokenizers", ())):
            if each["type"] == "ByteLevel":
                each["trim_offsets"] = True
        return canonical, self.ignore_merges


# Supported values of `tokenizer.ggml.pre` in files from other programs. Both stand for Llama 3's expression.
PRE_TOKENIZERS = {"smaug-bpe": LLAMA_3, "llama-bpe": LLAMA_3}

_DIGITS = {"type": "Digits", "individual_digits": True}
# llama.cpp's names for pipelines, each with its pre-tokenizer and `ignore_merges`.
_NAMED: tuple[tuple[str, tuple[Any, bool]], ...] = (
    ("smaug-bpe", (_split(LLAMA_3), True)),
    # This name is also used without `ignore_merges`, because llama.cpp always applies merges for it.
    ("smaug-bpe", (_split(LLAMA_3), False)),
    ("qwen2", (_split(QWEN_2), False)),
    ("gpt-2", (_byte_level(expression=True), False)),
    ("smollm", ({"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(expression=True)]}, False)),
    ("tekken", (_split(_TEKKEN), True)),
    ("gpt-4o", (_split(_GPT_4O), False)),
)

# Keys that have no effect on prompts (in transformers, too), and keys that are checked separately.
_OTHER_KEYS = {"version", "truncation", "padding", "added_tokens", "post_processor", "decoder"}


def _require_known_keys(part: Mapping[str, Any], what: str, known: set[str]) -> None:
    for key in part:
        if key not in known:
            raise ModelFileError(f"{what}: {quoted(key)} is not supported")


def _check_model(model: Mapping[str, Any]) -> None:
    known = {"type", "vocab", "merges", "dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"}
    _require_known_keys(model, "its model", known | {"continuing_subword_prefix", "end_of_word_suffix"})
    if model.get("type") != "BPE":
        raise ModelFileError(f"its model is {quoted(model.get('type'))}, not BPE")
    # Settings for the unknown token are not checked, because they have no effect: every byte has a token.
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ModelFileError(f"its model is not plain BPE: {name} is {quoted(model[name])}")


def _check_added(added: Any, normalizer: Any) -> None:
    if not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise ModelFileError("added_tokens must be a list")
    for token in added:
        known = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}
        _require_known_keys(token, f"added token {quoted(token.get('content'))}", known)
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                raise ModelFileError(f"added token {quoted(token.get('content'))}: {flag} is not supported")
        is_changed = normalizer is not None and not str(token.get("content")).isascii()
        if token.get("normalized") and (is_changed or "Lowercase" in json.dumps(normalizer)):
            raise ModelFileError(f"added token {quoted(token.get('content'))}: normalized is not supported")


def _check_normalizer(part: Any) -> None:
    match part:
        case None:
            return
        case {"type": "Sequence", "normalizers": [*each], **rest} if not rest:
            for one in each:
                _check_normalizer(one)
        case {"type": str(kind), **rest} if kind in _NORMALIZERS and not rest:
            return
        case {"type": "Prepend", "prepend": str(), **rest} if not rest:
            return
        case _:
            raise ModelFileError(f"its normalizer {quoted(_kind(part))} is not supported")


def _check_pre_tokenizer(part: Any) -> None:
    parts = part.get("pretokenizers") if isinstance(part, dict) and part.get("type") == "Sequence" else [part]
    if not isinstance(parts, list) or not parts or _kind(parts[-1]) != "ByteLevel":
        raise ModelFileError(f"its pre_tokenizer {quoted(_kind(part))} does not end with ByteLevel")
    for each in parts:
        _check_step(each)
    if [_kind(each) for each in parts].count("ByteLevel") > 1:
        raise ModelFileError("its pre_tokenizer has more than one ByteLevel")


def _check_step(part: Any) -> None:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": bool(), "use_regex": bool(), **rest} if _is_trim(rest):
            return
        case {"type": "Digits", "individual_digits": bool(), **rest} if not rest:
            return
        case {"type": "Punctuation", "behavior": str(behavior), **rest} if behavior in _BEHAVIORS and not rest:
            return
        case {"type": "Split", "pattern": pattern, "behavior": str(behavior), "invert": bool(), **rest} if (
            behavior in _BEHAVIORS and not rest
        ):
            _check_pattern(pattern)
        case _:
            raise ModelFileError(f"its pre_tokenizer {quoted(_kind(part))} is not supported with these settings")


def _is_trim(rest: Mapping[Any, Any]) -> bool:
    return not rest or (set(rest) == {"trim_offsets"} and isinstance(rest["trim_offsets"], bool))


def _check_pattern(pattern: Any) -> None:
    match pattern:
        case {"String": str(text), **rest} if text and not rest:
            return
        case {"Regex": str(expression), **rest} if expression in EXPRESSIONS and not rest:
            return
    raise ModelFileError(f"its pre_tokenizer splits by {quoted(pattern)}, which is not a supported expression")


def _check_post_processor(part: Any) -> None:
    match part:
        case None | {"type": "ByteLevel"}:  # changes only offsets, which are not used
            return
        case {"type": "Sequence", "processors": [*each]}:
            for one in each:
                _check_post_processor(one)
        case {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", **_kind_of}}]} if set(_kind_of) <= {
            "type_id"
        }:
            return
        case _:
            raise ModelFileError(f"its post_processor {quoted(_kind(part))} may add tokens, which is not supported")


def _check_decoder(part: Any) -> None:
    match part:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return
    raise ModelFileError(f"its decoder {quoted(_kind(part))} is not ByteLevel")


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else part


MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"


def tokenizer_entries(path: Path) -> dict[str, Any]:
    """Return the GGUF entries for a tokenizer.json and for a chat template next to it. Raises ModelFileError."""
    try:
        raw = read_regular(path, MAX_JSON_BYTES)
        if raw.startswith(LFS_POINTER):
            raise ModelFileError(f"{path.name} is {LFS_ADVICE}")
        content = json.loads(raw)
    except OSError as error:
        raise ModelFileError(f"the tokenizer file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError("the tokenizer file is not a byte-level BPE tokenizer.json") from error
    try:
        pipeline = TokenizerPipeline.from_json(content)
        by_id = {index: (text, NORMAL) for text, index in content["model"]["vocab"].items()}
        for added in content["added_tokens"]:
            by_id[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
        has_gaps = sorted(by_id) != list(range(len(by_id)))
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError("the tokenizer file is not a byte-level BPE tokenizer.json") from error
    if has_gaps:
        raise ModelFileError("the tokenizer file's ids have gaps")
    tokens = [by_id[i][0] for i in range(len(by_id))]
    entries: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [by_id[i][1] for i in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        **pipeline.entries(),
    }
    ids = {token: i for i, token in enumerate(tokens)}
    for key, text in (("bos", "<|begin_of_text|>"), ("eos", "<|im_end|>"), ("padding", "<|im_end|>")):
        if text in ids:
            entries[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    template = read_adjacent_template(path)
    return entries if template is None else entries | {"tokenizer.chat_template": template}


def read_adjacent_template(path: Path) -> str | None:
    """Return the chat template next to `path`, or None. Raises ModelFileError if it is unreadable."""
    try:
        return read_text(path.with_name(TEMPLATE_FILE), MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFileError(f"{TEMPLATE_FILE}: {error.strerror}") from error
    except NotTextError as error:
        raise ModelFileError(f"{TEMPLATE_FILE} {error}") from error
