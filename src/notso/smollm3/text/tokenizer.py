"""Text to token ids and back, from the vocabulary and merges that the GGUF file itself carries.

Text is encoded with its control tokens off unless the caller says otherwise: whoever types `<|im_end|>` gets the plain
text of it, never the token. Only `encode(text, control=True)` and the special runs of `encode_runs` yield special ids.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from notso.regular_file import read_regular
from notso.smollm3.errors import ContextLengthError, InvalidRequestError, ModelFileError, quoted
from notso.smollm3.text.special_tokens import SpecialTexts
from notso.smollm3.text.token_cache import EncodedTexts
from notso.smollm3.text.tokenizer_pipeline import SHRINKS, TokenizerPipeline
from notso.smollm3.text.vocabulary import Vocabulary, end_ids, gguf_list

# The engine has its own thread pool; a second one would fight it for the same cores. Read at each call, so this is
# early enough, and whoever sets the variable has the last word.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_TOKENIZER_JSON_BYTES = 64 * 2**20
COUNTED_TIMES = 4
"""Prompts of up to so many times the tokens that fit are counted: a person is told how much is too much."""
BATCH_CHARACTERS = 1 << 18


class Tokenizer:
    """Byte-level BPE of one model file; safe to use from several threads.

    `control_ids` and `user_defined_ids` together are the special tokens, `specials` their texts. `end_ids` end an
    answer. No ordinary token stands for more than `longest_bytes` of a text. The ids of thinking and tool-call tags are
    None where the file lacks them.
    """

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
        """Build from a file's metadata; a `tokenizer.json` lying beside `path` has precedence for the merges.

        Raises ModelFileError if a key is missing or of the wrong type, if the kind of tokenizer is not byte-level BPE,
        if the pre-tokeniser's name is unknown, or if the `tokenizer.json` has other tokens than the file.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelFileError(f"tokenizer.ggml.model is {quoted(kind)}; supported: 'gpt2' (byte-level BPE)")
        vocabulary = Vocabulary.from_gguf(metadata)
        beside = path.with_name("tokenizer.json") if path is not None else None
        if beside is not None and (beside.exists() or beside.is_symlink()):
            pipeline, encoder = _pipeline_from_json(beside, vocabulary)
        else:
            pipeline, encoder = _pipeline_from_gguf(metadata, vocabulary)
        shrinks = 1 if pipeline.normalizer is None else SHRINKS
        return cls(vocabulary, encoder, end_ids(metadata, vocabulary), shrinks)

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Token ids of `text`; nothing is put before or after it.

        With `control` the spelling of a special token becomes that token; by default it is ordinary text.
        Raises InvalidRequestError if `text` is not valid Unicode.
        """
        return self.encode_batch([text], control)[0]

    def encode_batch(self, texts: Sequence[str], control: bool = False) -> list[list[int]]:
        """Each text's ids, as `encode` gives them."""
        if control:
            return [self.encode_runs(self.specials.split(text)) for text in texts]
        for text in texts:
            check_unicode(text)
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def check_length(self, texts: Iterable[str], most_tokens: int) -> None:
        """Raises ContextLengthError for texts that cannot be `most_tokens` or fewer, whatever they say: found without
        encoding them, which takes a second and a hundred bytes for each of theirs."""
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > most_tokens * self.longest_bytes:
            raise ContextLengthError(-(-size // self.longest_bytes), most_tokens, at_least=True)

    def encode_runs(self, runs: Sequence[tuple[str, bool]], most_tokens: int | None = None) -> list[int]:
        """Ids of (text, special) runs in order: special ones by their text, each other one encoded as one piece.

        Raises InvalidRequestError if a run marked special is no special token's text, and ContextLengthError as soon as
        there are more than COUNTED_TIMES times `most_tokens`.
        """
        ids: list[int] = []
        for batch in _batches(runs):
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

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        """Text of `ids`, bytes that are not UTF-8 shown as U+FFFD. Control tokens are dropped unless asked for.

        Raises InvalidRequestError if an id is outside the vocabulary.
        """
        return b"".join(self.token_bytes(token, skip_control) for token in ids).decode("utf-8", "replace")

    def stream(self, skip_control: bool = True) -> TokenStream:
        """A decoder that is fed token by token."""
        return TokenStream(self, skip_control)

    def token_bytes(self, token: int, skip_control: bool = False) -> bytes:
        """Bytes of one token; with `skip_control` none for a control token or an unused place of the vocabulary."""
        if skip_control and (token in self.control_ids or token in self._vocabulary.unused_ids):
            return b""
        return self._vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        """One token as text, control tokens too; bytes that make no whole character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def id_of(self, text: str) -> int | None:
        """The id of the special token spelt `text`, or of the one ordinary token that stands for exactly `text`."""
        special = self._vocabulary.special_ids.get(text)
        if special is not None:
            return special
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None


def _batches(runs: Sequence[tuple[str, bool]]) -> Iterator[Sequence[tuple[str, bool]]]:
    """The runs in order, a few texts or one long one at a time: what is being encoded takes a hundred bytes a token."""
    begun, size = 0, 0
    for at, (text, _) in enumerate(runs):
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield runs[begun : at + 1]
            begun, size = at + 1, 0
    yield runs[begun:]


class TokenStream:
    """Decodes an answer while it grows: the pieces of `push` and `finish` join to `decode` of all ids.

    A character whose bytes are spread over tokens is held back until it is whole. What is left of one at the end, and
    bytes which no later token can make whole any more, come out as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty within a character of several bytes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, self._skip_control))

    def drop(self) -> None:
        """Forget the beginning of a character that is not whole."""
        self._decoder.reset()

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._decoder.decode(b"", True)


def check_unicode(text: str, param: str | None = None) -> None:
    """Raise InvalidRequestError if `text` holds half a surrogate pair, which has no UTF-8."""
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
    """What a tokenizer.json describes: how it cuts text, its merges, and whether it ignores them."""
    try:
        data = json.loads(read_regular(path, MAX_TOKENIZER_JSON_BYTES))
        pipeline = TokenizerPipeline.from_json(data)
        _require_same_tokens(data, vocabulary)
        merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in data["model"]["merges"]]
        return pipeline, pipeline.encoder(vocabulary.ordinary, merges, "model.merges")
    except OSError as error:
        raise _does_not_fit(path, error.strerror or "it cannot be read") from error
    except (KeyError, TypeError) as error:
        raise _does_not_fit(path, f"{type(error).__name__}: {error}") from error
    except (ModelFileError, ValueError, AttributeError, RecursionError) as error:  # whatever shape the JSON has
        raise _does_not_fit(path, str(error)) from error


def _does_not_fit(path: Path, said: str) -> ModelFileError:
    return ModelFileError(f"{path.name} beside the model does not fit it; mend or remove it: {said}")


def _require_same_tokens(data: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Raise ValueError unless a tokenizer.json has the very tokens of the model file."""
    model = data["model"]
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    ordinary = {text: index for text, index in model["vocab"].items() if text not in added}
    for found, expected in ((ordinary, vocabulary.ordinary), (added, vocabulary.special_ids)):
        # Places that the model file marks as unused may be named or not.
        named = {text: index for text, index in found.items() if index not in vocabulary.unused_ids}
        if named != expected:
            text = min(text for text, _ in named.items() ^ expected.items())
            raise ValueError(
                f"token {quoted(text)} has id {named.get(text)} there and {expected.get(text)} in the model"
            )
