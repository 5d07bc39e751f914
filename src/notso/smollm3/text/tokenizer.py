"""Encode and decode text with a GGUF file's vocabulary and merges.

By default, special tokens in text are not recognized: `<|im_end|>` typed by a user is encoded as plain text. Special
ids result only from `control=True`, and from runs that are marked as special in `encode_runs`.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from notso.smollm3.errors import ContextLengthError, InvalidRequestError, ModelFileError, quoted
from notso.smollm3.text.tokenizer_pipeline import SHRINKS, TokenizerPipeline
from notso.smollm3.text.vocabulary import Vocabulary, end_ids, gguf_list
from notso.text_file import read_regular


class Run(NamedTuple):
    """A special token, or ordinary text."""

    text: str
    special: bool


class SpecialTexts:
    """Splits text at special tokens. Raises ValueError for an empty token."""

    # Among overlapping matches, the leftmost is used, and among matches at the same position, the longest. The
    # `tokenizers` library splits at added tokens in the same way.
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = dict.fromkeys(texts)
        if "" in self._texts:
            raise ValueError("a special token has no text")
        lengths: dict[str, set[int]] = {}
        for special in self._texts:
            lengths.setdefault(special[0], set()).add(len(special))
        # A file may have a million special tokens. Texts are looked up by length, because a regular expression would
        # try each token at every position.
        self._lengths = {first: sorted(some, reverse=True) for first, some in lengths.items()}
        self._beginning = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def split(self, text: str) -> list[Run]:
        """Split a text into runs; ordinary runs are nonempty."""
        runs: list[Run] = []
        end = 0
        for found in self._beginning.finditer(text) if self._beginning else ():
            start = found.start()
            special = self._match_at(text, start) if start >= end else None
            if special is not None:
                runs += [Run(text[end:start], False)] * (start > end) + [Run(special, True)]
                end = start + len(special)
        return runs + [Run(text[end:], False)] * (end < len(text))

    def _match_at(self, text: str, start: int) -> str | None:
        for length in self._lengths[text[start]]:
            piece = text[start : start + length]
            if piece in self._texts:
                return piece
        return None


# The library's threads would compete with the engine's thread pool for the same cores. The library reads this variable
# at each call. A value that the user has set takes precedence.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_TOKENIZER_JSON_BYTES = 64 * 2**20
# Prompts that are too long are still encoded completely if they have at most this multiple of the token limit, so that
# the error can state their exact length.
COUNTED_TIMES = 4
BATCH_CHARACTERS = 1 << 18
LONG_CHARACTERS = 4 * BATCH_CHARACTERS


class Tokenizer:
    """Byte-level BPE tokenizer of a model file. Thread-safe."""

    # special_ids, specials: ids and texts of control and user-defined tokens.
    # think_open_id etc.: None if the file lacks the tag.
    # longest_bytes: the maximum number of bytes of text, before normalization, that one ordinary token can represent.
    # shrinks: the maximum factor by which normalization shrinks a text.
    def __init__(
        self, vocabulary: Vocabulary, encoder: tokenizers.Tokenizer, ends: frozenset[int], shrinks: int = 1
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._encoded = EncodedTexts()
        self.vocab_size = len(vocabulary)
        self.control_ids = vocabulary.control_ids
        self.user_defined_ids = vocabulary.user_defined_ids
        self.special_ids = vocabulary.control_ids | vocabulary.user_defined_ids
        self.unused_ids = vocabulary.unused_ids
        self.specials = SpecialTexts(vocabulary.special_ids)
        self.longest_bytes = vocabulary.longest_bytes * shrinks
        self.end_ids = ends
        self.think_open_id = vocabulary.special_ids.get("<think>")
        self.think_close_id = vocabulary.special_ids.get("</think>")
        self.tool_call_open_id = vocabulary.special_ids.get("<tool_call>")
        self.tool_call_close_id = vocabulary.special_ids.get("</tool_call>")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path | None = None) -> Tokenizer:
        """Build a tokenizer from metadata and any `tokenizer.json` next to `path`.

        Raises ModelFileError, for example if their tokens differ.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelFileError(f"tokenizer.ggml.model is {quoted(kind)}; supported: 'gpt2' (byte-level BPE)")
        vocabulary = Vocabulary.from_gguf(metadata)
        json_path = path.with_name("tokenizer.json") if path is not None else None
        if json_path is not None and (json_path.is_symlink() or json_path.exists()):
            pipeline, encoder = _pipeline_from_json(json_path, vocabulary)
        else:
            pipeline, encoder = _pipeline_from_gguf(metadata, vocabulary)
        shrinks = 1 if pipeline.normalizer is None else SHRINKS
        return cls(vocabulary, encoder, end_ids(metadata, vocabulary), shrinks)

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Return ids without a BOS token. `control`: recognize special tokens.

        Raises InvalidRequestError for invalid Unicode.
        """
        return self.encode_batch([text], control)[0]

    def encode_batch(self, texts: Sequence[str], control: bool = False) -> list[list[int]]:
        if control:
            return [self.encode_runs(self.specials.split(text)) for text in texts]
        for text in texts:
            check_unicode(text)
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def check_length(self, texts: Iterable[str], most_tokens: int) -> None:
        """Raise ContextLengthError if texts are certain to exceed `most_tokens`."""
        # Huge texts are rejected here, because encoding them would take up to a second and use a hundred bytes of
        # memory per token.
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > most_tokens * self.longest_bytes:
            raise ContextLengthError(-(-size // self.longest_bytes), most_tokens, at_least=True)

    def encode_runs(self, runs: Sequence[tuple[str, bool]], most_tokens: int | None = None) -> list[int]:
        """Encode (text, special) runs; each ordinary run is encoded separately.

        Raises InvalidRequestError for an unknown special token, and ContextLengthError for more than COUNTED_TIMES *
        `most_tokens` ids.
        """
        ids: list[int] = []
        for batch in _batches(runs):
            if most_tokens is not None:
                self._refuse_long_texts((text for text, special in batch if not special), most_tokens)
            ordinary = iter(self._encoded.encode([text for text, special in batch if not special], self.encode_batch))
            for text, special in batch:
                if not special:
                    ids += next(ordinary)
                elif text in self._vocabulary.special_ids:
                    ids.append(self._vocabulary.special_ids[text])
                else:
                    raise InvalidRequestError(f"{quoted(text)} is not a special token of this model")
            if most_tokens is not None and len(ids) > COUNTED_TIMES * most_tokens:
                raise ContextLengthError(len(ids), most_tokens, at_least=True)
        return ids

    def _refuse_long_texts(self, texts: Iterable[str], most_tokens: int) -> None:
        # Encoding a whole text takes a hundred bytes of memory per token, so the tokens of long texts are first counted
        # piece by piece. This count may be slightly inexact, because tokens can span the ends of pieces.
        for text in texts:
            count = 0
            for start in range(0, len(text) if len(text) > LONG_CHARACTERS else 0, BATCH_CHARACTERS):
                count += len(self.encode(text[start : start + BATCH_CHARACTERS]))
                if count > COUNTED_TIMES * most_tokens:
                    raise ContextLengthError(COUNTED_TIMES * most_tokens, most_tokens, at_least=True)

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """Return the text, by default without control tokens. Invalid UTF-8 becomes U+FFFD. Raises
        InvalidRequestError."""
        return b"".join(self.token_bytes(token, skip_control) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, skip_control: bool = False) -> bytes:
        """Return a token's bytes; with `skip_control`, control and unused tokens have none."""
        if skip_control and (token in self.control_ids or token in self._vocabulary.unused_ids):
            return b""
        return self._vocabulary.token_bytes(token)

    @cached_property
    def all_bytes(self) -> list[bytes]:
        # Cached and shared by all callers, because the list takes 10 MB for the 3B model.
        return list(map(self.token_bytes, range(self.vocab_size)))

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def id_of(self, text: str) -> int | None:
        special = self._vocabulary.special_ids.get(text)
        if special is not None:
            return special
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None


def _batches(runs: Sequence[tuple[str, bool]]) -> Iterator[Sequence[tuple[str, bool]]]:
    # Batches limit the peak memory, because the library uses a hundred bytes per token while it encodes.
    begun, size = 0, 0
    for at, (text, _) in enumerate(runs):
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield runs[begun : at + 1]
            begun, size = at + 1, 0
    yield runs[begun:]


class TokenStream:
    """Incremental decoder. The joined pieces equal `decode` of all ids."""

    # The bytes of an incomplete character are held back; bytes that cannot be part of a character become U+FFFD.
    def __init__(self, tokenizer: Tokenizer, skip_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token, self._skip_control))

    def drop(self) -> None:
        self._decoder.reset()

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


def check_unicode(text: str, param: str | None = None) -> None:
    """Raise InvalidRequestError for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"text is not valid Unicode: lone surrogate at character {error.start}"
        raise InvalidRequestError(message, param=param) from None


def _pipeline_from_gguf(
    metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[TokenizerPipeline, tokenizers.Tokenizer]:
    pipeline = TokenizerPipeline.from_gguf(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in gguf_list(metadata, "tokenizer.ggml.merges", str)]
    return pipeline, pipeline.encoder(vocabulary.ordinary, merges, "tokenizer.ggml.merges")


def _pipeline_from_json(path: Path, vocabulary: Vocabulary) -> tuple[TokenizerPipeline, tokenizers.Tokenizer]:
    try:
        data = json.loads(read_regular(path, MAX_TOKENIZER_JSON_BYTES))
        pipeline = TokenizerPipeline.from_json(data)
        _require_same_tokens(data, vocabulary)
        merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in data["model"]["merges"]]
        return pipeline, pipeline.encoder(vocabulary.ordinary, merges, "model.merges")
    except OSError as error:
        raise _mismatch_error(path, error.strerror or "cannot be read") from error
    except (KeyError, TypeError) as error:
        raise _mismatch_error(path, f"{type(error).__name__}: {error}") from error
    except (ModelFileError, ValueError, AttributeError, RecursionError) as error:
        raise _mismatch_error(path, str(error)) from error


def _mismatch_error(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path.name} does not match the model file next to it; fix or remove {path.name}: {problem}")


def _require_same_tokens(data: dict[str, Any], vocabulary: Vocabulary) -> None:
    model = data["model"]
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    ordinary = {text: index for text, index in model["vocab"].items() if text not in added}
    for found, expected in ((ordinary, vocabulary.ordinary), (added, vocabulary.special_ids)):
        # Tokens that the model file marks as unused need not match.
        named = {text: index for text, index in found.items() if index not in vocabulary.unused_ids}
        if named != expected:
            text = min(text for text, _ in named.items() ^ expected.items())
            raise ValueError(
                f"token {quoted(text)} has id {named.get(text)} in tokenizer.json, but "
                f"{expected.get(text)} in the model file"
            )


# Minimum length of a cached text. Shorter texts are fast to encode, and if they were cached, a user could guess other
# users' texts by timing requests.
LEAST_CHARACTERS = 512

# Maximum total size of cached texts and ids, which suffices for about eight million characters of plain English.
MOST_BYTES = 16 * 2**20


class EncodedTexts:
    """Cache of recently encoded texts. Thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[Sequence[int]]:
        """Return ids. `encode` is called at most once, for all uncached texts together."""
        with self._lock:
            cached = {
                text: self._texts[text] for text in texts if len(text) >= LEAST_CHARACTERS and text in self._texts
            }
            for text in cached:
                self._texts.move_to_end(text)
        new = [text for text in texts if text not in cached]
        ids = dict(zip(new, encode(new), strict=True)) if new else {}
        self._cache_ids(ids)
        return [cached[text] if text in cached else ids[text] for text in texts]

    def _cache_ids(self, ids: dict[str, list[int]]) -> None:
        with self._lock:
            for text, its_ids in ids.items():
                size = _size(text, len(its_ids))
                if len(text) >= LEAST_CHARACTERS and size <= MOST_BYTES and text not in self._texts:
                    self._texts[text] = array("i", its_ids)
                    self._bytes += size
            while self._bytes > MOST_BYTES:
                text, oldest_ids = self._texts.popitem(last=False)
                self._bytes -= _size(text, len(oldest_ids))


def _size(text: str, ids: int) -> int:
    return sys.getsizeof(text) + 4 * ids
