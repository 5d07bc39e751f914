"""Constrain an answer with a grammar, which applies after the reasoning, and with masked tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.grammar import GrammarCompiler, Matcher, Part, arguments_part, grammar_part
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import Tool
from notso.smollm3.values.request_options import RequestOptions, ToolName

CALL_TAG, CALL_END = "<tool_call>", "</tool_call>"
MAX_CALL_TOKENS = 1_000
"""If a call starts near the token limit, a search checks whether it can end within this many tokens."""


class FieldMask(Protocol):
    """Constraint on strings in JSON output, in addition to the grammar."""

    def narrow(self, allowed: npt.NDArray[np.bool_], logits: Floats) -> npt.NDArray[np.bool_]:
        """Return the mask (V,) `allowed` without the tokens that this constraint forbids."""

    def consume(self, text: bytes) -> None: ...


class StructuredOutput:
    """Masks tokens while one answer is generated."""

    has_grammar: bool = False
    constrains_tool_calls: bool = False

    def __init__(self, tokenizer: Tokenizer, masked: Sequence[int] = ()) -> None:
        self._masked = list(masked)
        self.call_tag = tokenizer.tool_call_open_id

    @property
    def in_call(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return False

    @property
    def is_whole(self) -> bool:
        """Whether the answer so far is complete JSON."""
        return False

    def must_end_reasoning(self, left: int, closing: int) -> bool:
        """Return whether reasoning must end now, so that `closing` tokens and an answer fit in `left` tokens."""
        return False

    def restrict(self, logits: Floats, in_reasoning: bool) -> Floats:
        """Return logits (V,) with forbidden tokens masked. Raises InvalidRequestError."""
        return _mask(logits, self._masked)

    def permits(self, token: int, in_reasoning: bool, left: int) -> bool:
        """Return whether the answer can end within `left` tokens after the unmasked `token`; True if unknown."""
        return True

    def narrow(self, logits: Floats, token: int, left: int) -> Floats:
        """Mask the rejected `token`, and possibly others, in the logits (V,) of `restrict`."""
        return _mask(logits, [token])

    def consume(self, token: int, in_reasoning: bool, left: int | None = None) -> bool:
        """Record a token, after which `left` tokens remain; return whether it starts the answer."""
        return False


class GrammarOutput(StructuredOutput):
    """Constrains an answer with a grammar."""

    has_grammar = constrains_tool_calls = True

    # The grammar constrains the answer from its first token. A newline is also allowed between the closing tag of the
    # reasoning and the answer. During reasoning, the grammar does not apply, but end tokens are masked.
    # may_think: whether the answer may begin with reasoning.
    # started: whether the prompt ends with the beginning of the answer.
    # closing: number of tokens that end the reasoning.
    def __init__(
        self,
        tokenizer: Tokenizer,
        matcher: Matcher,
        *,
        may_think: bool = False,
        masked: Sequence[int] = (),
        started: bool = False,
        closing: int = 1,
        fields: FieldMask | None = None,
    ) -> None:
        super().__init__(tokenizer, masked)
        self._fields = fields
        self._matcher = matcher
        self._may_think = may_think
        self._started = started
        self._closing = closing
        self._after_close = False
        self._ends = sorted(tokenizer.end_ids)
        self._text_of = tokenizer.token_bytes
        self._tags = tokenizer.think_open_id, tokenizer.think_close_id
        newline = tokenizer.encode("\n")
        self._newline = newline[0] if len(newline) == 1 else None
        self._least: tuple[int | None] | None = None  # (result of `_least_tokens`,), or None if not computed yet

    @property
    def is_over(self) -> bool:
        return self._started and self._matcher.is_over

    @property
    def is_whole(self) -> bool:
        return self._started and self._matcher.is_json and self._matcher.may_end

    def restrict(self, logits: Floats, in_reasoning: bool) -> Floats:
        if in_reasoning:
            self._may_think = False
            return _mask(logits, [*self._masked, *self._ends])
        allowed = self._matcher.allowed()
        if self._fields is not None:
            allowed = self._fields.narrow(allowed, logits)
        open_id, _ = self._tags
        if self._may_think and open_id is not None:
            allowed[open_id] = True
        if self._after_close and self._newline is not None:
            allowed[self._newline] = True
        allowed[self._masked] = False
        return _keep(logits, allowed)

    def must_end_reasoning(self, left: int, closing: int) -> bool:
        if self._started or left > self._matcher.least_estimate + closing + 1:
            return False
        least = self._least_tokens(left)
        return least is not None and closing + least <= left <= closing + least + 1

    def permits(self, token: int, in_reasoning: bool, left: int) -> bool:
        if in_reasoning or self._fields is not None:
            return True  # with `fields`, nothing is checked, because the search for endings ignores them
        open_id, _ = self._tags
        opens = self._may_think and token == open_id and open_id is not None
        if not self._started and (opens or (self._after_close and token == self._newline)):
            needed = self._closing if opens else 0
            if left > self._matcher.least_estimate + needed:
                return True
            least = self._least_tokens(left + 1)
            return least is None or least + needed <= left
        return self._matcher.permits(token, left)

    def narrow(self, logits: Floats, token: int, left: int) -> Floats:
        return _mask_choices(logits, token, self._matcher.remaining_choices(token, left))

    def _least_tokens(self, most: int) -> int | None:
        if self._least is None:
            self._least = (self._matcher.distance(most),)
        return self._least[0]

    def consume(self, token: int, in_reasoning: bool, left: int | None = None) -> bool:
        open_id, close_id = self._tags
        after_close, self._after_close = self._after_close, in_reasoning and token == close_id
        if in_reasoning:
            return False
        if not self._started:
            if self._may_think and token == open_id:
                self._may_think = False
                return False
            if after_close and token == self._newline:
                return False
        first, self._started, self._may_think = not self._started, True, False
        if token not in self._ends:
            self._matcher.consume(token, left)
            if self._fields is not None:
                self._fields.consume(self._text_of(token))
        return first


def mask_except(logits: Floats, ids: npt.NDArray[np.intp]) -> Floats:
    """Return logits (V,) in which all tokens except `ids` are masked."""
    restricted = np.full_like(logits, -np.inf)
    restricted[ids] = logits[ids]
    if not np.isfinite(restricted[ids]).any():  # true if other constraints mask all `ids`
        restricted[ids] = 0
    return restricted


def _mask(logits: Floats, ids: Sequence[int]) -> Floats:
    restricted = logits.copy()
    restricted[list(ids)] = -np.inf
    return restricted


def _keep(logits: Floats, allowed: npt.NDArray[np.bool_]) -> Floats:
    # Within a JSON string, almost all tokens are usually allowed, so masking the forbidden tokens is faster than
    # copying the allowed ones.
    restricted = logits.copy()
    np.copyto(restricted[: len(allowed)], -np.inf, where=~allowed)
    restricted[len(allowed) :] = -np.inf
    return restricted


def _mask_choices(logits: Floats, token: int, ids: npt.NDArray[np.intp] | None) -> Floats:
    return _mask(logits, [token]) if ids is None else mask_except(logits, ids)


class StructuredCalls(StructuredOutput):
    """Constrains only tool calls."""

    constrains_tool_calls = True

    # A call must start with the special token of its opening tag. Tokens that would complete the tag as ordinary text
    # are therefore masked.
    # started: the beginning of the answer, if the prompt contains it. If it ends with an unfinished call that violates
    # the grammar, InvalidRequestError is raised if is_strict is set; otherwise, this call is not constrained.
    def __init__(
        self,
        tokenizer: Tokenizer,
        matcher: Matcher,
        spelling: Mapping[bytes, Sequence[int]],
        started: str,
        *,
        is_strict: bool,
    ) -> None:
        super().__init__(tokenizer)
        self._tokenizer = tokenizer
        self._fresh_matcher = matcher
        self._spelling = spelling
        self._tail = started.encode()[-len(CALL_TAG) :]
        self._call: Matcher | None = None
        _, opened, rest = started.rpartition(CALL_TAG)
        if opened and CALL_END not in rest:
            self._open_call()
            if self._call is None or not self._call.try_consume_all(tokenizer.encode(rest)):
                if is_strict:
                    message = "the text so far does not match the tool's parameters"
                    raise InvalidRequestError(message, param="continue_last")
                self._call = None

    @property
    def in_call(self) -> bool:
        return self._call is not None

    def restrict(self, logits: Floats, in_reasoning: bool) -> Floats:
        if self._call is not None:
            return _keep(logits, self._call.allowed())
        masked = (
            []
            if in_reasoning
            else [token for prefix, tokens in self._spelling.items() if self._tail.endswith(prefix) for token in tokens]
        )
        return _mask(logits, masked) if masked else logits

    def consume(self, token: int, in_reasoning: bool, left: int | None = None) -> bool:
        if self._call is not None:
            self._call.consume(token, left)
            if self._call.is_over:
                self._call, self._tail = None, b""
        elif token == self.call_tag and not in_reasoning:
            self._open_call()
        else:
            text = b"" if in_reasoning else self._tail + self._tokenizer.token_bytes(token)
            self._tail = text[-len(CALL_TAG) :]
        return False

    def permits(self, token: int, in_reasoning: bool, left: int) -> bool:
        """Return whether a call can end within `left` tokens after `token`; True outside calls or if unknown."""
        if self._call is not None:
            return self._call.permits(token, left)
        if token != self.call_tag or in_reasoning:
            return True
        if left > self._fresh_matcher.least_estimate:
            return True
        least = self._fresh_matcher.distance(MAX_CALL_TOKENS)
        return least is None or least <= left + 1

    def narrow(self, logits: Floats, token: int, left: int) -> Floats:
        ids = self._call.remaining_choices(token, left) if self._call is not None else None
        return _mask_choices(logits, token, ids)

    def _open_call(self) -> None:
        if self.call_tag is not None:
            self._call, self._tail = self._fresh_matcher.copy(), b""
            self._call.consume(self.call_tag)


def structured_output_for(
    options: RequestOptions,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    *,
    may_think: bool,
    started: str,
    closing: int = 1,
    fields: FieldMask | None = None,
) -> StructuredOutput | None:
    """Return the constraints of a request, or None if it has none. Raises InvalidRequestError.

    started: beginning of the answer, if the prompt has it. closing: see GrammarOutput.
    """
    # tool_choice "none" masks the call tag but keeps the tools in the prompt, so that the prompt's cached prefix
    # remains valid.
    forbids_calls = options.tool_choice == "none" and bool(options.tools)
    masked = _tags(tokenizer)[:1] if forbids_calls else []
    matcher = _matcher(options, tokenizer, grammars)
    if matcher is None and options.tools and options.tool_choice == "auto":
        calls = _structured_calls(options, tokenizer, grammars, started)
        if calls is not None:
            return calls
    if matcher is None:
        return StructuredOutput(tokenizer, masked) if masked else None
    if started:
        if options.tool_choice == "required" or isinstance(options.tool_choice, ToolName):
            raise InvalidRequestError("tool calls cannot be required for a continued answer", param="continue_last")
        if not matcher.try_consume_all(tokenizer.encode(started)):
            raise InvalidRequestError("the text so far does not match the grammar", param="continue_last")
        if matcher.is_over:
            raise InvalidRequestError("the answer is already complete according to its grammar", param="continue_last")
    if fields is not None:
        for piece in re.split(rb'(?<=")', started.encode()):  # split so that no quotation begins within a piece
            fields.consume(piece)
        if not fields.narrow(matcher.allowed(), np.zeros(tokenizer.vocab_size, np.float32)).any():
            raise InvalidRequestError("the text so far does not match the documents", param="continue_last")
    may_think = options.thinking and may_think
    return GrammarOutput(
        tokenizer, matcher, may_think=may_think, masked=masked, started=bool(started), closing=closing, fields=fields
    )


def _matcher(options: RequestOptions, tokenizer: Tokenizer, grammars: GrammarCompiler) -> Matcher | None:
    choice = options.tool_choice
    if choice == "required" or isinstance(choice, ToolName):
        tools = _select_tools(options.tools or (), choice)
        if tokenizer.tool_call_open_id is None:
            raise InvalidRequestError(
                "this model has no token that begins a tool call, so tool calls cannot be required", param="tool_choice"
            )
        is_single = isinstance(choice, ToolName) or not options.parallel_tool_calls
        start = "start: call" if is_single else "start: calls"
        return _calls_matcher(start, tools, tokenizer, grammars, _arguments_parts(tools))
    if options.grammar is None:
        return None
    answer = grammar_part(options.grammar)
    if not options.tools or choice == "none" or tokenizer.tool_call_open_id is None:
        return grammars.matcher([answer], "grammar")
    start = f"start: @answer | {'calls' if options.parallel_tool_calls else 'call'}"
    grammars.matcher([answer], "grammar")  # checks the grammar by itself, so that later errors are about the tools
    parts = [{"name": "answer", **answer}, *_arguments_parts(options.tools)]
    return _calls_matcher(start, options.tools, tokenizer, grammars, parts)


def _calls_matcher(
    start: str, tools: Sequence[Tool], tokenizer: Tokenizer, grammars: GrammarCompiler, parts: Sequence[Part]
) -> Matcher:
    try:
        return grammars.matcher([_tool_calls_part(start, tools, tokenizer), *parts], "tools", _tags(tokenizer))
    except InvalidRequestError:
        named = [part for part in parts if part.get("name") != "answer"]
        for tool, part in zip(tools, named, strict=True):
            try:
                grammars.matcher([{key: value for key, value in part.items() if key != "name"}], "tools")
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"the parameters of {_name(tool)} cannot be enforced: {error}", param="tools"
                ) from None
        raise


def _structured_calls(
    options: RequestOptions, tokenizer: Tokenizer, grammars: GrammarCompiler, started: str
) -> StructuredOutput | None:
    # Constrains the tool names in calls, and the arguments of strict tools. Without strict tools, the result is None if
    # the model has no token for calls or a tool has no name.
    tools = options.tools or ()
    if not options.strict_tools and (tokenizer.tool_call_open_id is None or None in tool_names(tools)):
        return None
    if tokenizer.tool_call_open_id is None:
        raise InvalidRequestError(
            "this model has no token that begins a tool call, so arguments cannot be constrained", param="tools"
        )
    # Compiled before generation starts, because compiling it when a call starts would delay other answers.
    matcher = _calls_matcher("start: call", tools, tokenizer, grammars, _arguments_parts(tools, options.strict_tools))
    spelling = grammars.spelling(CALL_TAG)
    return StructuredCalls(tokenizer, matcher, spelling, started, is_strict=bool(options.strict_tools))


def _select_tools(tools: Sequence[Tool], choice: str | ToolName) -> Sequence[Tool]:
    if not tools:
        raise InvalidRequestError("tool_choice requires tools", param="tool_choice")
    if not isinstance(choice, ToolName):
        return tools
    chosen = [tool for tool in tools if _function(tool).get("name") == choice.name]
    if not chosen:
        raise InvalidRequestError(f"there is no tool named {choice.name!r}", param="tool_choice")
    return chosen[:1]


def _tool_calls_part(start: str, tools: Sequence[Tool], tokenizer: Tokenizer) -> Part:
    opening, closing = (
        json.dumps(text) if token is None else f"<[{token}]>"
        for text, token in (
            (CALL_TAG, tokenizer.tool_call_open_id),
            (CALL_END, tokenizer.tool_call_close_id),
        )
    )
    lines = [start, 'calls: call ("\\n"? call)*', f'call: {opening} "\\n" body "\\n" {closing}']
    bodies = []
    for number, tool in enumerate(tools):
        name = json.dumps(_name(tool), ensure_ascii=False)
        bodies.append(f"body_{number}")
        begins = json.dumps(f'{{"name": {name}, "arguments": ', ensure_ascii=False)
        lines.append(f'body_{number}: {begins} @arguments_{number} "}}"')
    lines.append(f"body: {' | '.join(bodies)}")
    return {"lark_grammar": "\n".join(lines)}


def _arguments_parts(tools: Sequence[Tool], strict: Collection[str] | None = None) -> list[Part]:
    # strict: names of the tools whose schemas are enforced, or None for all tools.
    return [
        {
            "name": f"arguments_{number}",
            **arguments_part(
                _function(tool).get("parameters") if strict is None or _name(tool) in strict else {}, _name(tool)
            ),
        }
        for number, tool in enumerate(tools)
    ]


def _function(tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def check_strict_tools(options: RequestOptions) -> None:
    """Raise InvalidRequestError if `strict_tools` contains a name that no tool has."""
    unknown = sorted(set(options.strict_tools) - tool_names(options.tools or ()))
    if unknown:
        raise InvalidRequestError(f"strict_tools: there is no tool named {unknown[0]!r}", param="strict_tools")


def tool_names(tools: Sequence[Tool]) -> set[Any]:
    """Return the names of tools, including None if a tool has no name."""
    return {name if isinstance(name := _function(tool).get("name"), str) and name else None for tool in tools}


def _name(tool: Tool) -> str:
    name = _function(tool).get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("a tool needs a name", param="tools")
    return name


def _tags(tokenizer: Tokenizer) -> list[int]:
    tags = tokenizer.tool_call_open_id, tokenizer.tool_call_close_id
    return [tag for tag in tags if tag is not None]
