"""Read the vocabulary of a GGUF file: text, bytes and kind of each token id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from notso.smollm3.errors import InvalidRequestError, ModelFileError, quoted

# tokenizer.ggml.token_type, numbered by the GGUF specification.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# Texts of tokens that always end a turn. Their ids vary from file to file.
END_TEXTS = ("<|im_end|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
# Project-specific key, because GGUF has keys for only three end ids, and generation_config.json may list any number.
END_IDS_KEY = "notso.tokenizer.eos_token_ids"

# Tags that this engine must find in the text of an answer. Fine-tuned models often declare them as control tokens,
# which are omitted from decoded text; this module therefore treats them as user-defined.
READ_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

# Maximum length of a token, which limits the work per token. Tokens in published files have at most 128 characters.
MAX_TOKEN_CHARACTERS = 1024

# Maximum length of a special token. The search for special tokens may try every length up to this one.
MAX_SPECIAL_CHARACTERS = 256

# Maximum number of different first characters. In published files, every special token begins with `<`.
MAX_SPECIAL_BEGINNINGS = 256

T = TypeVar("T")


def _byte_characters() -> list[str]:
    # GPT-2's table, which maps each byte to a printable character.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}


class Vocabulary:
    """Validated tokens and their kinds. Raises ModelFileError with the key or token."""

    # Decoded text omits tokens of `control_ids` but includes tokens of `user_defined_ids` (`<think>`, `<tool_call>`,
    # ...).
    def __init__(self, tokens: Sequence[str], kinds: Sequence[int]) -> None:
        if len(tokens) != len(kinds):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(kinds)} entries, but there are {len(tokens)} tokens"
            )
        self.tokens = tokens
        _check_texts(tokens)
        by_kind: dict[int, list[int]] = {kind: [] for kind in (UNKNOWN, CONTROL, USER_DEFINED, UNUSED)}
        for index, kind in enumerate(kinds):
            if kind != NORMAL:
                if kind not in by_kind:
                    raise ModelFileError(f"tokenizer.ggml.token_type: token {index} has unsupported type {kind}")
                by_kind[USER_DEFINED if kind == CONTROL and tokens[index] in READ_TAGS else kind].append(index)
        self.control_ids = frozenset(by_kind[CONTROL] + by_kind[UNKNOWN])
        self.user_defined_ids = frozenset(by_kind[USER_DEFINED])
        self.unused_ids = frozenset(by_kind[UNUSED])
        self.special_ids = {tokens[i]: i for i in sorted(self.control_ids | self.user_defined_ids)}
        if "" in self.special_ids:
            raise ModelFileError(f"tokenizer.ggml.tokens: special token {self.special_ids['']} has no text")
        _check_specials(self.special_ids)
        self._not_ordinary = {tokens[index] for indices in by_kind.values() for index in indices}
        self.longest_bytes = max((len(token) for token in tokens if token not in self._not_ordinary), default=1)
        self._check_byte_level()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        tokens = gguf_list(metadata, "tokenizer.ggml.tokens", str)
        return cls(tokens, gguf_list(metadata, "tokenizer.ggml.token_type", int))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ordinary(self) -> dict[str, int]:
        # The dict is not cached, because it takes ten megabytes and is needed only while the tokenizer is built.
        return {token: index for index, token in enumerate(self.tokens) if token not in self._not_ordinary}

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes. Raises InvalidRequestError for an invalid id."""
        if not 0 <= token < len(self.tokens):
            raise InvalidRequestError(f"token id {token} is outside 0..{len(self.tokens) - 1}", param="tokens")
        text = self.tokens[token]
        if text not in self._not_ordinary:
            return text.translate(_BYTE_OF_CHARACTER).encode("latin-1")
        return text.encode()

    def _check_byte_level(self) -> None:
        ordinary = self.ordinary
        missing = [byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in ordinary]
        if missing:
            raise ModelFileError(f"tokenizer.ggml.tokens has no token for byte {missing[0]:#04x}")
        if not set("".join(ordinary)) <= set(BYTE_CHARACTERS):
            odd = next(token for token in ordinary if not set(token) <= set(BYTE_CHARACTERS))
            raise ModelFileError(f"tokenizer.ggml.tokens: {quoted(odd)} (id {ordinary[odd]}) is not byte-level encoded")


def _check_texts(tokens: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise ModelFileError(
                f"tokenizer.ggml.tokens: token {index} has {len(token):,} characters; the limit is "
                f"{MAX_TOKEN_CHARACTERS:,}"
            )
        if first.setdefault(token, index) != index:
            raise ModelFileError(
                f"tokenizer.ggml.tokens: {quoted(token)} occurs more than once (ids {first[token]} and {index})"
            )


def _check_specials(special_ids: Mapping[str, int]) -> None:
    # These limits keep the time of searching for special tokens linear in the length of the text.
    for text, index in special_ids.items():
        if len(text) > MAX_SPECIAL_CHARACTERS:
            raise ModelFileError(
                f"tokenizer.ggml.tokens: special token {index} has {len(text):,} characters; the limit is "
                f"{MAX_SPECIAL_CHARACTERS}"
            )
    beginnings = len({text[0] for text in special_ids})
    if beginnings > MAX_SPECIAL_BEGINNINGS:
        raise ModelFileError(
            f"tokenizer.ggml.tokens: special tokens begin with {beginnings:,} different characters; the limit is "
            f"{MAX_SPECIAL_BEGINNINGS}"
        )


def end_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> frozenset[int]:
    """Return the end tokens that the file or the model family defines. Raises ModelFileError if they are invalid or
    missing."""
    ends = {index for text in END_TEXTS if (index := vocabulary.special_ids.get(text)) is not None}
    named = [(key, index) for key in END_KEYS if (index := metadata.get(key)) is not None]
    if END_IDS_KEY in metadata:
        named += [(END_IDS_KEY, index) for index in gguf_list(metadata, END_IDS_KEY, int)]
    for key, index in named:
        require_token_id(key, index, len(vocabulary))
        ends.add(index)
    if not ends:
        raise ModelFileError("the file has no end-of-sequence token (tokenizer.ggml.eos_token_id)")
    return frozenset(ends)


def require_token_id(key: str, index: Any, vocab_size: int) -> None:
    """Raise ModelFileError unless the value of `key` is a token id."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < vocab_size:
        raise ModelFileError(f"{key} must be 0..{vocab_size - 1}, not {quoted(index)}")


def gguf_list(metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """Return a list with items of type `kind`. Raises ModelFileError."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"the file has no {key}")
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list | tuple) or set(map(type, items)) - {kind}:
        raise ModelFileError(f"{key} must be a list of {kind.__name__}")
    return list(items)
