"""Render conversations with a model's chat template, so that content never yields control tokens.

Before rendering, every `<` in content is replaced by a stand-in, a character that occurs nowhere else in the prompt.
Every special token begins with `<`, so special tokens in the rendered text come only from the template or, for past
reasoning and tool calls, from this module. The rendered text is split at special tokens. In the text between them,
stand-ins are replaced by `<` again, and each piece is encoded without recognizing special tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from itertools import chain
from typing import Any

from notso.smollm3.errors import EngineError, InvalidRequestError, ModelFileError, Sentence, TemplateError, quoted
from notso.smollm3.strict_json import is_json_object
from notso.smollm3.text import template_sandbox
from notso.smollm3.text.template_sandbox import SandboxFailure
from notso.smollm3.text.tokenizer import Run, SpecialTexts, Tokenizer, check_unicode
from notso.smollm3.text.vocabulary import require_token_id
from notso.smollm3.values.messages import ROLES, Message, Tool, ToolCall, thinking_set_by
from notso.smollm3.values.model_info import LATER_SYSTEM, OVERRIDDEN_TOOLS, dropped_parts

MAX_TEMPLATE_CHARACTERS = 65_536
MAX_ERROR_CHARACTERS = 200

# Templates that have been reviewed and therefore run in this process: SHA-256 of the UTF-8 text, and origin.
KNOWN_TEMPLATES = {
    "3e0e275a527f249670056e0078e474eadbdd007c134b4fdfae5a7b3089702814": "HuggingFaceTB/SmolLM3-3B",
    "b9b66f04c64fbb8695cf5b35c37780efd0b8e0829fbfe3e30fafb9f469b7d30e": "ggml-org/SmolLM3-3B-GGUF",
    "7fb78f6bbda2e1ec0ed5481201674d70e591684186b93c1c430f19bc177add56": "the demo model, training/chat_template.jinja",
}

_MARKER = re.compile(r"<\|\w+\|>")
# Flags that SmolLM3's templates look for in a system message.
_FLAGS = re.compile("(/no_think|/think|/system_override)")

# Candidates for the stand-in: printable characters without case, so that no template alters them. Characters that look
# like angle brackets come first, because they keep rendered text readable. Only a conversation of hundreds of kilobytes
# can contain all the ideographs and syllables.
_STAND_INS = ((0x2039, 0x27E8, 0x276E, 0x3008), range(0x4E00, 0x9FFF), range(0xAC00, 0xD7A4), range(0x20000, 0x2A6D0))

_log = logging.getLogger(__name__)


class ChatTemplate:
    """A chat template. If it is not in `known`, it runs in a confined child process.

    Raises TemplateError if it does not compile or its output fails a check, and ModelFileError for an unsupported
    special token.
    """

    def __init__(
        self,
        source: str,
        specials: Iterable[str] = (),
        *,
        bos_token: str = "",
        eos_token: str = "",
        known: Collection[str] = KNOWN_TEMPLATES.keys(),
    ) -> None:
        # specials: texts of the special tokens.
        # bos_token, eos_token: texts of these tokens, or empty if the file has none.
        # known: SHA-256 hashes of the templates that run in this process.
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARACTERS} characters")
        self.source = source
        # As in transformers, `tools` and `documents` are None, not undefined. Tools are passed as `xml_tools` instead.
        self._constants = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        try:
            self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        except UnicodeEncodeError:
            raise TemplateError("the chat template is not valid Unicode") from None
        self.is_known = self.sha256 in known
        self._specials = SpecialTexts(specials)
        for text in self._specials:
            if not text.startswith("<"):
                raise ModelFileError(
                    f"special token {quoted(text)} does not begin with '<', so it cannot be distinguished from content"
                )
        try:
            self._template = template_sandbox.compile_template(source) if self.is_known else None
        except SandboxFailure as failure:
            raise _template_error(failure) from failure
        if not self.is_known:
            _log.warning(
                "the model's chat template is unknown (sha256 %s), so it runs in a separate process", self.sha256
            )
        self._check_output()
        self.drops = self._detect_dropped_parts()

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, *, source: str | None = None
    ) -> ChatTemplate | None:
        """Return the template `source` or else the file's, or None if both are missing. Raises ChatTemplate's
        errors."""
        source = metadata.get("tokenizer.chat_template") if source is None else source
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelFileError("tokenizer.chat_template must be a string")
        named = {f"{key}_token": _token_text(metadata, key, tokenizer) for key in ("bos", "eos")}
        # Control tokens that the template does not print, such as an added [PAD], need not be distinguished from
        # content.
        specials = [
            text
            for text in tokenizer.specials
            if text.startswith("<")
            or tokenizer.id_of(text) not in tokenizer.control_ids
            or text in source
            or text in named.values()
        ]
        return cls(source, specials, **named)

    def _check_output(self) -> None:
        specials = frozenset(self._specials)
        question = f"probe {secrets.token_hex(8)}"  # random, so that no template contains it
        first = [Message("user", question)]
        later = [Message("user", "What is this?"), Message("assistant", "A test."), *first]
        batch = [
            _Conversation(messages, None, thinking).variables(str)
            for messages in (first, later)
            for thinking in (True, False)
        ]
        for printed in self._render(batch, _today()):
            if not printed.strip():
                raise TemplateError("the model's chat template prints nothing")
            if question not in printed:
                raise TemplateError("the model's chat template omits the user's message")
            for text in _MARKER.findall(printed) if specials else ():
                if text not in specials:
                    raise ModelFileError(f"the chat template prints {text}, which is not a token of the vocabulary")

    def _detect_dropped_parts(self) -> tuple[str, ...]:
        mark = f"probe {secrets.token_hex(8)}"
        system = Message("system", "/system_override")
        later = [Message("user", "a"), Message("assistant", "b"), Message("system", mark), Message("user", "c")]
        tool: Tool = {"type": "function", "function": {"name": mark}}
        conversations = {LATER_SYSTEM: _Conversation(later, None, True)}
        if "xml_tools" in self.source:
            conversations[OVERRIDDEN_TOOLS] = _Conversation([system, Message("user", "a")], [tool], True)
        dropped = []
        for name, conversation in conversations.items():
            try:
                (printed,) = self._render([conversation.variables(str)], _today())
            except TemplateError:  # a template that rejects the conversation drops nothing silently
                continue
            dropped += [name] if mark not in printed else []
        return tuple(dropped)

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: date | None = None,
    ) -> str:
        """Return the template's output.

        If `date` stays the same, cached prefixes remain valid after midnight. Raises InvalidRequestError, and
        TemplateError if the template fails.
        """
        # Past reasoning is omitted unless its message has keep_reasoning and thinking is on. Tools are passed to the
        # template as JSON texts in `xml_tools`.
        return "".join(run.text for run in self.runs(messages, thinking=thinking, tools=tools, date=date))

    def runs(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: date | None = None,
    ) -> list[Run]:
        conversation = _Conversation(messages, tools, thinking)
        return self._render_runs(conversation, date, check=False)[0]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: date | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return token ids. Raises the same errors as `render`, EngineError if content yields special tokens, and
        ContextLengthError for far more than `most_tokens` ids."""
        conversation = _Conversation(messages, tools, thinking)
        runs, skeleton = self._render_runs(conversation, date)
        if most_tokens is not None:
            tokenizer.check_length((run.text for run in runs if not run.special), most_tokens)
        ids = tokenizer.encode_runs(runs, most_tokens)
        # If the prompt's special tokens differ from those of the skeleton (see `_render_runs`), content has yielded
        # special tokens: this module has a bug, or the template alters text.
        expected = tokenizer.encode_runs([run for run in self._specials.split(next(skeleton)) if run.special])
        if [token for token in ids if token in tokenizer.special_ids] != expected:
            raise EngineError(
                "the prompt contains special tokens that the template did not write; nothing was generated"
            )
        return ids

    def _render_runs(
        self, conversation: _Conversation, day: date | None, check: bool = True
    ) -> tuple[list[Run], Iterator[str]]:
        # With `check`, the second result yields the skeleton: the conversation rendered with "x" in place of each
        # character of its content except whitespace and flags.
        if conversation.tools and "xml_tools" not in self.source:
            raise InvalidRequestError(
                Sentence("this model's chat template does not support tools", "template_no_tools"), param="tools"
            )
        for name in dropped_parts(self.drops, conversation.roles, conversation.first, bool(conversation.tools)):
            _log.warning("the chat template does not include this in the prompt: %s", name)
        stand_in = conversation.unused_character(self.source)
        contents: list[Callable[[str], str]] = [lambda text: text.replace("<", stand_in), _skeleton]
        texts = self._render(map(conversation.variables, contents if check else contents[:1]), day or _today())
        runs = self._specials.split(next(texts))
        return [run if run.special else Run(run.text.replace(stand_in, "<"), False) for run in runs], texts

    def _render(self, batch: Iterable[dict[str, Any]], day: date) -> Iterator[str]:
        # With a known template, each conversation is rendered in this process when it is requested. With an unknown
        # template, all are rendered at once, in one child process.
        variable_sets = (self._constants | variables for variables in batch)
        try:
            if self._template is None:
                yield from template_sandbox.render_in_child(self.source, list(variable_sets), day)
                return
            for variables in variable_sets:
                yield template_sandbox.render_in_process(self._template, variables, day)
        except SandboxFailure as failure:
            raise _template_error(failure) from failure


def _token_text(metadata: Mapping[str, Any], key: str, tokenizer: Tokenizer) -> str:
    name = f"tokenizer.ggml.{key}_token_id"
    index = metadata.get(name)
    if index is None:
        return ""
    require_token_id(name, index, tokenizer.vocab_size)
    return tokenizer.token_text(index)


class _Conversation:
    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool] | None, thinking: bool) -> None:
        if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
            raise InvalidRequestError("messages must be a list of Messages", param="messages")
        if not messages:
            raise InvalidRequestError("there is no message to answer", param="messages")
        if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
            raise InvalidRequestError("tools must be a list", param="tools")
        fixed = thinking_set_by(messages[0].content) if messages[0].role == "system" else None
        thinks = bool(thinking) if fixed is None else fixed
        self.turns = [(message.role, _message_pieces(message, thinks)) for message in messages]
        self.roles, self.first = [message.role for message in messages], messages[0].content
        self.tools = [_tool_json(tool) for tool in tools or ()]
        self.thinking = bool(thinking)

    def variables(self, content: Callable[[str], str]) -> dict[str, Any]:
        variables: dict[str, Any] = {
            "messages": [
                {"role": role, "content": "".join(text if ours else content(text) for text, ours in pieces)}
                for role, pieces in self.turns
            ],
            "enable_thinking": self.thinking,
            "add_generation_prompt": True,
        }
        if self.tools:
            variables["xml_tools"] = [content(tool) for tool in self.tools]
        return variables

    def unused_character(self, template: str) -> str:
        used = set(template).union(*self.tools, *(text for _, pieces in self.turns for text, _ in pieces))
        found = next((c for c in map(chr, chain(*_STAND_INS)) if c not in used), None)
        if found is None:
            raise InvalidRequestError(
                Sentence("messages use too many different characters", "prompt_characters"), param="messages"
            )
        return found


def check_message(message: Message) -> None:
    """Raise InvalidRequestError if a field is invalid."""
    if message.role not in ROLES:
        raise InvalidRequestError(f"role must be one of {', '.join(ROLES)}", param="messages")
    if not isinstance(message.content, str):
        raise InvalidRequestError("content must be text", param="messages")
    if not isinstance(message.reasoning_content, str | None):
        raise InvalidRequestError("reasoning_content must be text", param="messages")
    calls = message.tool_calls
    if not isinstance(calls, Sequence) or not all(isinstance(call, ToolCall) for call in calls):
        raise InvalidRequestError("tool_calls must be ToolCalls", param="messages")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError("only an assistant message can have tool calls", param="messages")


def _message_pieces(message: Message, thinks: bool) -> list[tuple[str, bool]]:
    check_message(message)
    pieces = [(message.content, False)]
    if message.keep_reasoning and message.reasoning_content and message.role == "assistant" and thinks:
        pieces = [("<think>\n", True), (message.reasoning_content, False), ("\n</think>\n", True), *pieces]
    for call in message.tool_calls:
        before = "\n" if pieces[-1][0] and not pieces[-1][0].endswith("\n") else ""
        pieces += [(f"{before}<tool_call>\n", True), (_call_json(call), False), ("\n</tool_call>", True)]
    for text, _ in pieces:
        check_unicode(text, "messages")
    return pieces


def _call_json(call: ToolCall) -> str:
    if not isinstance(call.name, str) or not isinstance(call.arguments, str):
        raise InvalidRequestError("a tool call needs a name, and arguments as a string", param="messages")
    # Arguments are not reformatted, so that a cached prefix still matches. The arguments of a truncated call are
    # written as a JSON string, because one malformed call must not make a whole conversation unusable.
    arguments = call.arguments.strip() or "{}"
    if not is_json_object(arguments):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'


def _tool_json(tool: Tool) -> str:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError("a tool must be a JSON object", param="tools")
    try:
        text = json.dumps(dict(tool), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"a tool is not valid JSON: {error}", param="tools") from None
    check_unicode(text, "tools")
    return text


def _skeleton(text: str) -> str:
    # Whitespace and flags are kept, because the output of templates depends on them.
    pieces = _FLAGS.split(text)
    return "".join(piece if index % 2 else re.sub(r"\S", "x", piece) for index, piece in enumerate(pieces))


def _template_error(failure: SandboxFailure) -> TemplateError:
    message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(failure)[:MAX_ERROR_CHARACTERS])
    return TemplateError(Sentence(f"the model's chat template says: {message}", "template_says", said=message))


def _today() -> date:
    return date.today()
