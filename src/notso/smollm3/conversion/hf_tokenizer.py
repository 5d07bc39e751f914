"""Convert a folder's tokenizer and chat template to GGUF entries.

tokenizer.json, which `text/tokenizer_pipeline.py` reads, defines how text is split; tokenizer_config.json lists the
special tokens and, in older folders, contains the template. Unknown fields must be null, false or empty, and the
converted tokenizer must produce the same ids as the `tokenizers` library on the texts in PROBES. Source: transformers
5.24, tokenization_utils_tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from notso.smollm3.conversion.hf_config import Entries, read_object
from notso.smollm3.errors import ModelFileError, quoted
from notso.smollm3.strict_json import OFF
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.tokenizer_pipeline import MAX_JSON_BYTES, tokenizer_entries
from notso.smollm3.text.vocabulary import CONTROL, END_IDS_KEY, UNUSED
from notso.text_file import read_regular

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
NAMED_TEMPLATES = "additional_chat_templates"
MAX_TOKENIZER_CONFIG_BYTES = 4 << 20

HARMLESS = frozenset(
    {
        # options of tokenizer calls (truncation, padding, return values) and of decoding, which this engine ignores
        *("model_max_length", "max_length", "model_input_names", "padding_side", "truncation_side", "stride"),
        *("truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "return_tensors", "errors"),
        *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "response_schema"),
        # names, options of loading, and names of files that tokenizer.json replaces
        *("name_or_path", "processor_class", "auto_map", "special_tokens_map_file", "tokenizer_file", "vocab_file"),
        *("merges_file", "from_slow", "legacy", "is_local", "local_files_only", "backend", "use_fast"),
    }
)
# Classes that use tokenizer.json as it is; others may split text differently.
CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_COMPUTED = frozenset({*SPECIAL, *SPECIAL_LISTS, "chat_template", "added_tokens_decoder", "tokenizer_class"})

# Texts that tokenizers often split differently: contractions, spaces, digits, scripts, Unicode normalization.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say it's HERS, won't they? WE'RE, I'D; don’t.",
    " a  b   c\t\td\n\ne \r\n f\n \n  g   ",
    "0 12 345 6789 12345678 3.14159 1,000,000 ٣٤٥ ½ x2 2x",
    "def f(x):\n    return {'a': x[0]**2, \"b\": f'{x!r}'}  # why?\n\n\n",
    "<div class=\"a-b_c\">&amp;</div> a/b\\c $x^2$ -->=== ???!!! ...",
    "Grüße, žluťoučký kůň; привет, мир! 你好，世界。 こんにちは カタカナ 한국어 مرحبا हिन्दी ไทย",
    "e\u0301 \u00e9 \u1112\u1161\u11ab \ufb01 \uff21\uff22 \u212b \u0130stanbul \u00df",
    "👩‍👩‍👧 🎉🇪🇺 \u200b\u00a0\u3000\u0085 \ufeff a\u0000b",
    "CamelCaseWords lowerUPPER SHOUTING iOS18 x86_64 ŒUVRE",
    "", " ", "\n", "a",
)  # fmt: skip


def folder_tokenizer(folder: Path, vocab: int, ends: Sequence[int]) -> Entries:
    """Return the `tokenizer.*` entries for an embedding of `vocab` rows.

    Raises ModelFileError if the tokenizer is unsupported or conversion would change token ids.
    """
    found = tokenizer_entries(folder / TOKENIZER_FILE)
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    if len(tokens) > vocab:
        raise ModelFileError(f"{TOKENIZER_FILE} has {len(tokens):,} tokens, but the embedding has {vocab:,} rows")
    config = read_object(folder, TOKENIZER_CONFIG, MAX_TOKENIZER_CONFIG_BYTES, is_optional=True)
    _check_config(config)
    _mark_special(config, found)
    if "eos_token" in config or "bos_token" in config:
        _name_special(config, found, ends)
    elif ends:
        found["tokenizer.ggml.eos_token_id"] = ends[0]
    others = [each for each in ends if each != found.get("tokenizer.ggml.eos_token_id")]
    if others:
        found["tokenizer.ggml.eot_token_id"] = others[0]  # for llama.cpp, which does not read END_IDS_KEY
        found[END_IDS_KEY] = list(ends)
    template = found.pop("tokenizer.chat_template", None)
    template = _template(config) if template is None else template
    if template is None:
        raise ModelFileError(
            f"the folder has no chat template, neither next to {TOKENIZER_FILE} nor in {TOKENIZER_CONFIG}"
        )
    _reject_named_templates(folder, config)
    found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": template}
    _compare_tokenizers(folder / TOKENIZER_FILE, found, _added_tokens(config))
    # Add unused tokens: the vocabulary must have as many tokens as the embedding has rows.
    tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab)]
    kinds += [UNUSED] * (vocab - len(kinds))
    found["tokenizer.ggml.add_bos_token"] = False
    return {key: (value, _entry_type(key, value)) for key, value in found.items()}


def _entry_type(key: str, value: Any) -> str:
    if isinstance(value, list):
        of = "string" if isinstance(value[0] if value else "", str) else "int32"
        return f"array of {'uint32' if key == END_IDS_KEY else of}"
    return {bool: "bool", str: "string", int: "uint32"}[type(value)]


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("tokenizer_class") not in CLASSES:
        raise ModelFileError(
            f"{TOKENIZER_CONFIG}: tokenizer_class is {quoted(config['tokenizer_class'])}, which may split text "
            "differently; use PreTrainedTokenizerFast"
        )
    for name, value in config.items():
        if name not in _COMPUTED and name not in HARMLESS and value not in OFF:
            raise ModelFileError(f"{TOKENIZER_CONFIG}: {quoted(name)} is {quoted(value)}, which is not supported")


def _token_text(name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not text:
        raise ModelFileError(f"{TOKENIZER_CONFIG}: {name} contains {quoted(token)}, which is not a token")
    return text


def _special_tokens(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [(name, _token_text(name, config[name])) for name in SPECIAL if config.get(name) is not None]
    for name in SPECIAL_LISTS:
        tokens = config.get(name) or []
        tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
        if not isinstance(tokens, list):
            raise ModelFileError(f"{TOKENIZER_CONFIG}: {name} must be a list of tokens, not {quoted(tokens)}")
        found += [(name, _token_text(name, each)) for each in tokens]
    return found


def _mark_special(config: Mapping[str, Any], found: dict[str, Any]) -> None:
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    ids = {text: index for index, text in enumerate(tokens)}
    for name, text in _special_tokens(config):
        # Only tokenizer.json assigns ids to tokens, so every special token must be defined there.
        if text not in ids:
            raise ModelFileError(f"{TOKENIZER_CONFIG}: {name} {quoted(text)} is not a token of {TOKENIZER_FILE}")
        kinds[ids[text]] = CONTROL
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(isinstance(each, dict) for each in added.values()):
        raise ModelFileError(f"{TOKENIZER_CONFIG}: added_tokens_decoder must be an object of tokens")
    for index, token in added.items():
        text = _token_text("added_tokens_decoder", token)
        if str(ids.get(text)) != index:
            raise ModelFileError(
                f"{TOKENIZER_CONFIG}: added_tokens_decoder gives {quoted(text)} the id {quoted(index)}, but "
                f"{TOKENIZER_FILE} gives it {ids.get(text)}"
            )


def _added_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {token["content"]: token for token in (config.get("added_tokens_decoder") or {}).values()}


def _name_special(config: Mapping[str, Any], found: dict[str, Any], ends: Sequence[int]) -> None:
    ids = {text: index for index, text in enumerate(found["tokenizer.ggml.tokens"])}
    # Chat templates can use bos_token and eos_token. A GGUF file must have an end token even if
    # tokenizer_config.json has no eos_token.
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        found.pop(f"tokenizer.ggml.{key}_token_id", None)
        if config.get(name) is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = ids[_token_text(name, config[name])]
    if "tokenizer.ggml.eos_token_id" not in found and ends:
        found["tokenizer.ggml.eos_token_id"] = ends[0]


def _template(config: Mapping[str, Any]) -> str | None:
    # In older folders, tokenizer_config.json contains the template, either as text or in a list of named templates.
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (each.get("template") for each in template if isinstance(each, dict) and each.get("name") == "default"),
            None,
        )
    return template if isinstance(template, str) else None


def _reject_named_templates(folder: Path, config: Mapping[str, Any]) -> None:
    # If a request has tools, transformers replaces the default template with one named tool_use, if it exists.
    templates = config.get("chat_template")
    in_list = isinstance(templates, list) and any(
        isinstance(each, dict) and each.get("name") == "tool_use" for each in templates
    )
    if in_list or (folder / NAMED_TEMPLATES / "tool_use.jinja").exists():
        raise ModelFileError("the folder has a separate chat template for tools (tool_use), which is not supported")


def _compare_tokenizers(path: Path, found: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]) -> None:
    ours = Tokenizer.from_gguf(found)
    try:
        theirs = tokenizers.Tokenizer.from_buffer(read_regular(path, MAX_JSON_BYTES))
    except Exception as error:  # the library raises no more specific class
        raise ModelFileError(f"{path.name}: {error}") from error
    theirs.no_truncation()
    theirs.no_padding()
    tokens = found["tokenizer.ggml.tokens"]
    for index, text in enumerate(tokens):
        if theirs.id_to_token(index) != text:
            raise ModelFileError(
                f"{path.name}: token {index} is {quoted(theirs.id_to_token(index))}, "
                f"but was converted to {quoted(text)}"
            )
    for token in theirs.get_added_tokens_decoder().values():
        for flag in _FLAGS[: len(_FLAGS) if token.content in named else 0]:
            configured = named[token.content].get(flag)
            if configured is not None and configured != getattr(token, flag):
                raise ModelFileError(f"{TOKENIZER_CONFIG}: {flag} of {quoted(token.content)} differs from {path.name}")
    between = [text for text, _ in zip(ours.specials, range(8), strict=False)]
    for text in [*PROBES, *(f"{special}user\n {PROBES[0]}{special}\n" for special in between)]:
        if ours.encode(text, control=True) != theirs.encode(text).ids:
            raise ModelFileError(f"{path.name}: {quoted(text)} would get different token ids after conversion")
