"""Grammar-constrained decoding. Only this module uses the library llguidance."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.gbnf import gbnf_to_lark
from notso.smollm3.sampling.schemas.json_schema import (
    MAX_CHARACTERS,
    MAX_INTERSECTED,
    checked_schema,
    enforced_schema,
)
from notso.smollm3.sampling.schemas.patterns import PatternError, has_lookaround, library_pattern, shorten
from notso.smollm3.sampling.shortest_end import ShortestEndingSearch
from notso.smollm3.sampling.token_limit import MAX_DIGITS, JsonState, Pieces, TokenLimit, grammar_extent, number_digits
from notso.smollm3.strict_json import json_or_none
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import Grammar

if TYPE_CHECKING:
    import llguidance

# A grammar in the format of llguidance: {"json_schema": ...} or {"lark_grammar": ...}.
Part = dict[str, Any]

# Limits enforced by llguidance. A grammar that exceeds a limit fails without delaying other requests.
MAX_LEXER_STATES = 20_000  # one or two kilobytes each
MAX_GRAMMAR_SIZE = 100_000
MAX_ROW_ITEMS = 1_000  # alternative parses of a text; each takes time at every token

# Maximum length of a grammar in a request. Parsing takes about 300 bytes of memory per character. Schemas have a
# separate limit.
MAX_GRAMMAR_CHARACTERS = 2**18

# Grammars of at least this length may need more stack than a thread usually has: about 5 KiB for each of up to
# MAX_DESCENT levels (see json_schema). Such grammars are parsed in a thread with a larger stack. The system commits
# only the part of the stack that is used.
DEEP_CHARACTERS = 8_192
DEEP_STACK_BYTES = 128 * 2**20

# JSON on one line, with an optional space after commas and colons.
JSON_STYLE = {
    "whitespace_flexible": False,  # otherwise a model could write spaces forever
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',  # no numeric escapes: half a surrogate pair is invalid text
}


_DEEP = threading.Lock()
MAX_COMPILED, MAX_COMPILED_CHARACTERS = 8, 100_000
"""Maximum number of cached grammars, and maximum length of each in characters."""

MAX_PLACES = 200
"""Maximum number of parts of a schema that are tested to find the part that no value satisfies."""

_UNSATISFIABLE = "Unsatisfiable schema"
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")

_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
# A literal or comment. An unclosed literal extends to the end of the line, so that scanning takes linear time.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*+(?P<text>")?|/(?:\\.|[^/\\\n])++(?P<regex>/)?|(?P<comment>//[^\n]*|#[^\n]*)')


class Matcher:
    """State of a grammar's parser for one answer."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        permitted: npt.NDArray[np.bool_],
        vocabulary: Pieces,
        param: str,
        *,
        is_json: bool = False,
        tags: Sequence[int] = (),
        limit: Callable[[], TokenLimit],
    ) -> None:
        # is_json: whether the answer is JSON or tool calls. It becomes True at a token of `tags`, because such a token
        # begins a call.
        self._param = param
        self._matcher = matcher
        self._permitted = permitted
        self._ends = vocabulary.ends
        self._texts, self._digits = vocabulary.texts, vocabulary.digits
        self._state = JsonState()
        self.is_json = is_json
        self._tags = frozenset(tags)
        self._make_limit = limit
        self._limit: TokenLimit | None = None
        self._first_token: int | None = None

    def copy(self) -> Matcher:
        copied = copy.copy(self)
        copied._matcher, copied._limit = self._matcher.deep_copy(), None
        return copied

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return a mask (V,) of allowed tokens. Raises InvalidRequestError if there are none or a limit is exceeded."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(self._permitted), bitorder="little").view(np.bool_)
        self._require_no_error()
        allowed &= self._permitted
        if not self.may_end:
            allowed[self._ends] = False
        if self.is_json:
            allowed = self._mask_long_numbers(allowed)
        if not allowed.any():
            raise InvalidRequestError("the grammar leads to a state without an allowed token", param=self._param)
        return allowed

    def _mask_long_numbers(self, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        left = MAX_DIGITS - self._state.digits
        if self._state.in_string or left >= self._longest_number:
            return allowed
        narrowed: npt.NDArray[np.bool_] = allowed & (self._digits <= max(left, 0))
        return narrowed if narrowed.any() else allowed

    @cached_property
    def _longest_number(self) -> int:
        return int(self._digits.max(initial=0))

    def consume(self, token: int, left: int | None = None) -> None:
        self._matcher.consume_token(token)
        if self._first_token is None:
            self._first_token = token
        if self._limit is not None and left is not None:
            self._token_limit().consume(token, left)
        self._state = self._state.state_after(self._texts[token])
        self.is_json |= token in self._tags
        self._require_no_error()

    def try_consume_all(self, tokens: Sequence[int]) -> bool:
        """Consume tokens; return False if they violate the grammar."""
        self._state = self._state.state_after(b"".join(self._texts[token] for token in tokens))
        return bool(self._matcher.try_consume_tokens(list(tokens)) == len(tokens))

    def distance(self, most: int) -> int | None:
        """Return the length, up to `most`, of a token sequence that completes the answer, or None if none was found."""
        limit = self._token_limit()
        return limit.distance(self._matcher, most, self._state)

    @property
    def least_estimate(self) -> float:
        return self._token_limit().least_estimate

    def permits(self, token: int, left: int) -> bool:
        is_end = token in self._ends and self.may_end
        return is_end or self._token_limit().permits(self._matcher, token, left, self._state)

    def remaining_choices(self, token: int, left: int) -> npt.NDArray[np.intp] | None:
        return None if self._limit is None else self._limit.remaining_choices(token, left)

    def _token_limit(self) -> TokenLimit:
        self._limit = self._limit or self._make_limit()
        if self._first_token is not None and self._first_token not in self._tags:
            self._limit.exclude_calls()
        return self._limit

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            reason = f"the answer can no longer follow its grammar: {_readable_error(self._matcher.get_error())}"
            raise InvalidRequestError(reason, param=self._param)


class GrammarCompiler:
    """Creates matchers for one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = np.array(sorted(tokenizer.end_ids), np.intp)
        self._permitted = np.ones(tokenizer.vocab_size, np.bool_)
        self._permitted[sorted((tokenizer.special_ids | tokenizer.unused_ids) - tokenizer.end_ids)] = False
        self._lock = threading.Lock()
        self._spellings: dict[str, dict[bytes, list[int]]] = {}
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._pieces: Pieces | None = None
        self._ending_search: ShortestEndingSearch | None = None
        self._compiled: dict[str, Matcher] = {}  # recent matchers in their initial state

    def matcher(self, parts: Sequence[Part], param: str, tags: Sequence[int] = ()) -> Matcher:
        """Return a matcher for the first part, which can refer to other parts by name.

        Control tokens are masked, except `tags` and end tokens. Raises InvalidRequestError with `param`.
        """
        key = json.dumps([parts, param, tags])
        with self._lock:
            compiled = self._compiled.pop(key, None)
        compiled = compiled or self._compile(parts, param, tags)
        with self._lock:
            if len(key) <= MAX_COMPILED_CHARACTERS:
                self._compiled[key] = compiled
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return compiled.copy()

    def _compile(self, parts: Sequence[Part], param: str, tags: Sequence[int]) -> Matcher:
        created = self._create_matcher(parts)
        if created.is_error():
            reason = _readable_error(created.get_error())
            if reason.startswith(_UNSATISFIABLE) and "json_schema" in parts[0]:
                reason = self._describe_unsatisfiable(parts[0]["json_schema"])
            raise InvalidRequestError(f"the grammar is refused: {reason}", param=param)
        permitted = self._permitted.copy()
        permitted[list(tags)] = True
        answer = next((part for part in parts if part.get("name") == "answer"), parts[-1])
        matcher = Matcher(
            created,
            permitted,
            self._vocabulary_pieces(),
            param,
            is_json="json_schema" in answer,
            tags=tags,
            limit=partial(self._limit, parts, tags),
        )
        try:
            matcher.allowed()
        except InvalidRequestError as error:
            raise InvalidRequestError(f"the grammar is refused: {error}", param=param) from None
        return matcher

    def _create_matcher(self, parts: Sequence[Part]) -> llguidance.LLMatcher:
        import llguidance

        vocabulary, text = self._llguidance_tokenizer(), json.dumps({"grammars": list(parts)})
        make = partial(
            llguidance.LLMatcher,
            vocabulary,
            text,
            log_level=0,
            limits=llguidance.LLParserLimits(
                max_lexer_states=MAX_LEXER_STATES,
                max_grammar_size=MAX_GRAMMAR_SIZE,
                max_items_in_row=MAX_ROW_ITEMS,
                verbose_errors=False,
            ),
        )
        return make() if len(text) < DEEP_CHARACTERS else _run_with_large_stack(make)

    def _describe_unsatisfiable(self, schema: Mapping[str, Any]) -> str:
        # llguidance names only the outermost property, so each part is tested separately, from the outside inward.
        shared = {name: schema[name] for name in ("$defs", "x-guidance") if name in schema}
        part, pointer, tries = schema, "", 0
        places = _subschemas(part, shared)
        while tries < MAX_PLACES and (place := next(places, None)) is not None:
            tries += 1
            suffix, inner = place
            created = self._create_matcher([{"json_schema": {**inner, **shared}}])
            if created.is_error() and created.get_error().startswith(_UNSATISFIABLE):
                part, pointer = inner, pointer + suffix
                places = _subschemas(part, shared)
        shown = json.dumps({name: each for name, each in part.items() if name not in shared}, ensure_ascii=False)
        return f"no value satisfies {pointer or 'the schema'}: {shorten(shown)}"

    def _limit(self, parts: Sequence[Part], tags: Sequence[int]) -> TokenLimit:
        with self._lock:
            if self._ending_search is None:
                self._ending_search = ShortestEndingSearch(self._tokenizer)
        return TokenLimit(self._ending_search, grammar_extent(parts), tags, self._vocabulary_pieces())

    def _vocabulary_pieces(self) -> Pieces:
        with self._lock:
            if self._pieces is None:
                texts = self._tokenizer.all_bytes
                self._pieces = Pieces(self._ends, texts, number_digits(texts))
            return self._pieces

    def spelling(self, tag: str) -> dict[bytes, list[int]]:
        with self._lock:
            if tag not in self._spellings:
                self._spellings[tag] = _spelling(self._tokenizer, tag.encode())
            return self._spellings[tag]

    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        # Building the vocabulary, in the first call, takes a third of a second with the 3B model.
        import llguidance

        with self._lock:
            if self._vocabulary is None:
                ends = sorted(self._tokenizer.end_ids)
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=ends
                )
            return self._vocabulary


class _Vocabulary:
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.end_ids)
        self.tokens = tokenizer.all_bytes
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.unused_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _spelling(tokenizer: Tokenizer, tag: bytes) -> dict[bytes, list[int]]:
    # Returns, for each prefix of a tag, the tokens that complete the tag if they follow this prefix.
    spelling: dict[bytes, list[int]] = {}
    for token, text in enumerate(tokenizer.all_bytes):
        if tag[-1:] not in text or token in tokenizer.special_ids:
            continue
        if tag in text:
            spelling.setdefault(b"", []).append(token)
        for cut in range(1, len(tag)):
            if text.startswith(tag[cut:]):
                spelling.setdefault(tag[:cut], []).append(token)
    return spelling


def grammar_part(grammar: Grammar) -> Part:
    """Return the grammar of a request as a Part. Raises InvalidRequestError."""
    most = MAX_CHARACTERS if grammar.kind == "json_schema" else MAX_GRAMMAR_CHARACTERS
    if len(grammar.source) > most:
        raise InvalidRequestError(f"the grammar is longer than {most:,} characters", param="grammar")
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the grammar is not valid Unicode", param="grammar") from None
    if grammar.kind == "json_object":
        return schema_part({"type": "object"})
    if grammar.kind == "json_schema":
        return schema_part(checked_schema(grammar.source).schema)
    if grammar.kind == "regex":
        return _regex_part(grammar.source)
    if grammar.kind == "gbnf":
        return {"lark_grammar": gbnf_to_lark(grammar.source)}
    if grammar.kind == "choice":
        return _choice_part(grammar.source)
    return {"lark_grammar": _checked_lark(grammar.source)}


def _regex_part(source: str) -> Part:
    import llguidance

    try:
        if has_lookaround(source):
            source = library_pattern(f"^(?:{source})$").removeprefix("^").removesuffix("$")
    except PatternError as error:
        if _LOOK_AROUND.search(source):
            raise InvalidRequestError(f"the regular expression {error}: {shorten(source)}", param="grammar") from None
        # llguidance may support syntax that is invalid in ECMA-262, so the pattern is passed to it unchanged.
    return {"lark_grammar": f"start: /{llguidance.regex_to_lark(source, '')}/"}


def _checked_lark(source: str) -> str:
    # %json is rejected, because it would bypass the checks of schemas. For the limit on intersections, see
    # MAX_INTERSECTED.
    bare = _LITERAL.sub(lambda found: " " if found.lastgroup else found[0], source)
    if bare.count("&") > MAX_INTERSECTED:
        raise InvalidRequestError(f"the grammar intersects more than {MAX_INTERSECTED} terminals", param="grammar")
    if "%json" in bare:
        raise InvalidRequestError("%json is not supported in a grammar: send the schema itself", param="grammar")
    return source


def _choice_part(source: str) -> Part:
    texts = json_or_none(source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequestError("choices must be a list of nonempty texts", param="grammar")
    literals = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(literals)}"}


def schema_part(schema: Mapping[str, Any]) -> Part:
    """Return the grammar of a checked schema."""
    return {"json_schema": {**schema, "x-guidance": JSON_STYLE}}


def arguments_part(parameters: object, tool: str) -> Part:
    """Return the grammar of a tool's arguments. Raises InvalidRequestError."""
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    try:
        schema = enforced_schema(parameters, "tools").schema
        if len(_schema_to_json(parameters)) > MAX_CHARACTERS:
            raise InvalidRequestError(f"they are longer than {MAX_CHARACTERS:,} characters", param="tools")
        if schema.get("type", "object") != "object":
            raise InvalidRequestError("arguments must be an object", param="tools")
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the parameters of {tool} cannot be enforced: {error}", param="tools") from None
    return schema_part({"type": "object", **schema})


def _subschemas(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Yields the direct parts of a schema, with JSON pointers relative to the schema.
    if "$ref" in schema:
        yield "", root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    named = {f"/properties/{name}": each for name, each in schema.get("properties", {}).items()}
    listed = {f"/{word}/{at}": each for word in _LISTS for at, each in enumerate(schema.get(word, ()))}
    for pointer, each in (named | listed | {"/items": schema.get("items")}).items():
        if isinstance(each, dict):
            yield pointer, each


def _run_with_large_stack(make: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    # Only one such thread runs at a time, so that large grammars occupy at most one core.
    with _DEEP, ThreadPoolExecutor(1, "grammar") as pool:
        previous_size = threading.stack_size(DEEP_STACK_BYTES)
        try:
            future = pool.submit(make)  # starts the thread
        finally:
            threading.stack_size(previous_size)
        return future.result()


def _schema_to_json(schema: object) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"they are not JSON: {error}", param="tools") from None


def _readable_error(error: str) -> str:
    # Replaces obscure messages of llguidance, and shortens others to their first line.
    if "lookarounds not supported" in error:
        return "^ and $ are supported only at the start and the end of a pattern"
    if "NoExtensionBias" in error:
        return "it matches no text"
    if "Current row has" in error:
        return "it has too many alternatives at one place, such as consecutive optional properties of an object"
    return error.strip().split("\n", 1)[0][:200]
