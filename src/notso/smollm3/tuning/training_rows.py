"""Build training rows, which are tokenized conversations with labels, from JSONL.

The model's chat template renders the conversations as it does at run time. Only the tokens of answers, including their
end tokens, have labels.

Rehearsal rows contain answers of the untuned model; training on them preserves its abilities.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notso.qtensor import GGUFFile
from notso.smollm3.common_prefix import common_length
from notso.smollm3.errors import InvalidRequestError, TemplateError, one_line, quoted
from notso.smollm3.output.tool_parser import OPEN, ToolCallParser
from notso.smollm3.strict_json import OFF
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.prompt import PromptWriter
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import Message, ToolCall
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams
from notso.text_file import NotTextError, read_text

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.output.generation import Generation

THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n"
# Tags on separate lines take precedence, because reasoning can mention </think>.
_REASONING = re.compile(r"\s*<think>(?:\n(.*?)\n</think>\n|\n?(.*?)\n?</think>\n?)", re.DOTALL)
# Message fields in which other programs store reasoning.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
NOT_LEARNED = -100  # label that PyTorch's cross entropy ignores

MAX_BYTES = 1 << 30
LEAST_TO_HOLD_OUT = 10  # with fewer rows, none are held out


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """Token ids and labels; the label is NOT_LEARNED where the loss is masked."""

    ids: list[int]
    labels: list[int]


class RowWriter:
    """Builds rows for one model; prompts contain the date `day`."""

    def __init__(self, prompts: PromptWriter, tokenizer: Tokenizer, max_tokens: int, day: date) -> None:
        self._prompts = prompts
        self._ends = tokenizer.end_ids
        self._max_tokens = max_tokens
        self._day = day

    @classmethod
    def of(cls, base: Path, max_tokens: int, day: date) -> RowWriter:
        """Load a model's template and tokenizer. Raises GGUFError, ModelFileError or TemplateError."""
        with GGUFFile.open(base) as file:
            tokenizer = Tokenizer.from_gguf(file.metadata, file.path)
            prompts = PromptWriter(ChatTemplate.from_gguf(file.metadata, tokenizer), tokenizer)
        return cls(prompts, tokenizer, max_tokens, day)

    def read(self, path: Path) -> list[TrainingRow]:
        """Read a JSONL file. Raises OSError, TemplateError or InvalidRequestError."""
        rows = []
        # `str.splitlines` is not used, because it also splits at characters that JSON need not escape, such as U+2028.
        for number, line in enumerate(_text_of(path).split("\n"), 1):
            if not line.strip():
                continue
            place = f"{path.name}, line {number}"
            try:
                rows.append(self.row(json.loads(line)))
            except TemplateError as error:
                raise TemplateError(f"{place}: {one_line(str(error))}") from None
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{place}: {one_line(str(error))}", param="data") from None
        if not rows:
            raise InvalidRequestError(f"{path.name} has no rows", param="data")
        return rows

    def row(self, record: Any) -> TrainingRow:
        """Build a row from `messages`, or `prompt` and `completion`, with optional `tools` and `chat_template_kwargs`.

        Raises ValueError or TemplateError.
        """
        messages, learned_from, template_kwargs = _conversation(record)
        thinking = template_kwargs.get("enable_thinking", True) is not False
        options = RequestOptions(thinking=thinking, tools=parse_tools(record.get("tools")), date=self._day)
        ids: list[int] = []
        labels: list[int] = []
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._prompts.write(messages[:at], options).ids
            whole = self._conversation_ids(messages[: at + 1], options)
            if before[: len(ids)] != ids or whole[: len(before)] != before:
                raise ValueError("the template renders a message differently when another message follows")
            end = 1 + max((place for place, token in enumerate(whole) if token in self._ends), default=-1)
            if not end:
                raise ValueError("the template writes no end token after an answer")
            learns = at >= learned_from and (bool(message.reasoning_content) or not _uses_thinking(messages, options))
            labels += [NOT_LEARNED] * (len(before) - len(ids))
            labels += whole[len(before) : end] if learns else [NOT_LEARNED] * (end - len(before))
            labels += [NOT_LEARNED] * (len(whole) - end)
            ids = whole
        learned = [place for place, label in enumerate(labels[: self._max_tokens]) if label != NOT_LEARNED]
        if not learned:
            raise ValueError(f"there is no answer to train on within {self._max_tokens:,} tokens")
        return TrainingRow(ids[: learned[-1] + 1], labels[: learned[-1] + 1])

    def _conversation_ids(self, messages: Sequence[Message], options: RequestOptions) -> list[int]:
        # The two prompts differ only in the last user message, so the common prefix is the rendered conversation, up to
        # the text of this message.
        one, other = (self._prompts.write([*messages, Message("user", words)], options).ids for words in ("a", "1"))
        return one[: common_length(one, other)]


def _text_of(path: Path) -> str:
    try:
        return read_text(path, MAX_BYTES)
    except NotTextError as error:
        raise InvalidRequestError(f"{path.name} {error}", param="data") from None


def _uses_thinking(messages: Sequence[Message], options: RequestOptions) -> bool:
    # If thinking is on and any answer has reasoning, answers without reasoning get no labels.
    return options.thinking and any(message.reasoning_content for message in messages)


def _conversation(record: Any) -> tuple[list[Message], int, Mapping[str, Any]]:
    if not isinstance(record, dict):
        raise ValueError("a row must be an object")
    options = _template_kwargs(record)
    if "messages" in record:
        messages = list(parse_messages(record["messages"], "messages"))
        return messages, 0, options
    if "prompt" in record and "completion" in record:
        prompt = list(parse_messages(record["prompt"], "prompt"))
        return [*prompt, *parse_messages(record["completion"], "completion")], len(prompt), options
    raise ValueError("a row needs messages, or a prompt and a completion")


def _template_kwargs(record: Mapping[str, Any]) -> Mapping[str, Any]:
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError("chat_template_kwargs must be an object")
    for name, value in options.items():
        if name != "enable_thinking" and value not in OFF:
            raise ValueError(f"chat_template_kwargs: {quoted(name)} is not supported")
    if not isinstance(options.get("enable_thinking"), bool | None):
        raise ValueError("enable_thinking must be true or false")
    return options


def parse_messages(records: Any, name: str) -> Iterator[Message]:
    """Yield parsed messages. Raises ValueError."""
    if not isinstance(records, list) or not records:
        raise ValueError(f"{name} must be a list of messages")
    for each in records:
        role, content = (each.get(key) for key in ("role", "content")) if isinstance(each, dict) else (None, None)
        if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str | None):
            raise ValueError(f"{name}: {quoted(each)} has an invalid role or content")
        if not isinstance(given := each.get("tool_calls") or [], list):
            raise ValueError(f"{name}: tool_calls must be a list")
        calls = [_parse_tool_call(call) for call in given]
        text, thoughts = content or "", None
        if role == "assistant":
            _require_learnable(each, name)
            text, thoughts, written = _split_answer(text)
            calls = [*written, *calls]
            fields = (each.get(key) for key in _REASONING_FIELDS)
            thoughts = thoughts or next((field for field in fields if isinstance(field, str) and field), None)
        yield Message(role, text, thoughts or None, tuple(calls), keep_reasoning=bool(thoughts))


def _require_learnable(answer: Mapping[str, Any], name: str) -> None:
    if answer.get("function_call"):
        raise ValueError(f"{name}: function_call is not supported; use tool_calls")
    if name != "prompt" and answer.get("weight", 1) not in (1, None):
        raise ValueError(
            f"{name}: the weight of a message must be 1; to exclude earlier answers, use prompt and completion"
        )


def _split_answer(text: str) -> tuple[str, str, list[ToolCall]]:
    # Reasoning and calls are parsed, so that their tags are rendered as special tokens, as in answers of the model.
    thoughts = ""
    if found := _REASONING.match(text):
        thoughts, text = found[1] or found[2] or "", text[found.end() :]
    elif text.lstrip().startswith("<think>"):
        raise ValueError("an answer begins with <think>, but </think> is missing")
    elif THINK_CLOSE in text and "<think>" not in text:  # templates of other models put <think> into the prompt
        raise ValueError("an answer has a line </think>, but <think> is missing")
    if OPEN not in text:
        return text, thoughts, []
    parser = ToolCallParser()
    pieces = [piece for piece in (*parser.push(text), *parser.finish()) if not isinstance(piece, str) or piece.strip()]
    words = [piece for piece in pieces if isinstance(piece, str)]
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    if [*words, *calls] != pieces:  # calls followed by text are treated as examples and not parsed
        return text, thoughts, []
    return "".join(words), thoughts, calls


def parse_tools(tools: Any) -> list[Any] | None:
    """Return a row's tools, or None. Raises ValueError."""
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools must be a list of objects")
    return tools or None


def _parse_tool_call(call: Any) -> ToolCall:
    try:
        function = call["function"]
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(str(call.get("id", "")), str(function["name"]), written)
    except (TypeError, KeyError, AttributeError):
        raise ValueError("a tool call needs a function with name and arguments") from None


def split(rows: Sequence[TrainingRow], holdout: float, seed: int) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Split rows at random into training rows and held-out rows."""
    count = max(round(len(rows) * holdout), 1) if holdout and len(rows) >= LEAST_TO_HOLD_OUT else 0
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    return [row for at, row in enumerate(rows) if at not in chosen], [rows[at] for at in sorted(chosen)]


SHIPPED = Path(__file__).with_name("rehearsal.txt")  # default rehearsal questions, written for this project

AT_ONCE = 64  # number of conversations that are submitted to the engine together

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class RehearsalConversation:
    """A conversation for the model to answer."""

    # An answer is generated after each user message and after the last of successive tool results, unless an assistant
    # message follows in `messages`; in that case, that message is used.
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    thinking: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)

    def advance_to_question(self) -> bool:
        while self.messages and not self._awaits_answer():
            if self.messages[0]["role"] == "tool" and not self._awaits_result():
                return False  # this is the result of a call that the model has not made
            self.history.append(self.messages.pop(0))
        return self._awaits_answer()

    def _awaits_answer(self) -> bool:
        last = self.history[-1]["role"] if self.history else "system"
        following = self.messages[0]["role"] if self.messages else "user"
        answers_are_due = {"user": ("system", "user", "tool"), "tool": ("system", "user")}
        return following in answers_are_due.get(last, ())

    def _awaits_result(self) -> bool:
        # `parse_messages` also finds calls in the content. One answer can be followed by several results.
        latest_first = parse_messages(self.history[::-1], "messages") if self.history else ()
        for results, message in enumerate(latest_first):
            if message.role != "tool":
                return results < len(message.tool_calls)
        return False


def read(text: str, name: str) -> list[RehearsalConversation]:
    """Parse questions or JSON conversations, one per line. Raises InvalidRequestError with the line number."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            record: Any = {"messages": [{"role": "user", "content": line}]}
            if line.startswith("{"):
                record = json.loads(line)
            messages = record.get("messages")
            list(parse_messages(messages, "messages"))
            if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            thinks = _template_kwargs(record).get("enable_thinking")
            # Answers are generated both with and without thinking, unless chat_template_kwargs selects one mode.
            for thinking in (False, True) if thinks is None else (thinks is not False,):
                found.append(RehearsalConversation(list(messages), parse_tools(record.get("tools")), thinking))
        except (ValueError, RecursionError, AttributeError) as error:
            raise InvalidRequestError(f"{name}, line {number}: {one_line(str(error))}", param="rehearse") from None
    return found


def generate_answers(
    engine: Engine,
    conversations: Sequence[RehearsalConversation],
    max_tokens: int,
    day: date,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Generate greedy answers and return a row for each usable answer."""
    rows = []
    for start in range(0, len(conversations), AT_ONCE):
        progress("answering rehearsal questions", start, len(conversations))
        open_ones = list(conversations[start : start + AT_ONCE])
        while open_ones := [each for each in open_ones if each.advance_to_question()]:
            generations = [_submit(engine, each, max_tokens, day) for each in open_ones]
            answers = [
                _answer(generation, each.thinking) for generation, each in zip(generations, open_ones, strict=True)
            ]
            for each, answer in zip(open_ones, answers, strict=True):
                # The answer is unusable, for example truncated, or without reasoning although thinking is on.
                if answer is None:
                    each.history.clear()
                    each.messages.clear()
                    continue
                rows.append(_row(each, answer))
                each.history.append(answer | {"content": answer["content"].rpartition(THINK_CLOSE)[2]})
    progress("answering rehearsal questions", len(conversations), len(conversations))
    return rows


def _submit(engine: Engine, conversation: RehearsalConversation, max_tokens: int, day: date) -> Generation:
    options = RequestOptions(thinking=conversation.thinking, tools=conversation.tools, date=day)
    messages = list(parse_messages(conversation.history, "messages"))
    return engine.submit(messages, SamplingParams(temperature=0, max_tokens=max_tokens), options)


def _answer(generation: Generation, thinking: bool) -> dict[str, Any] | None:
    answer = generation.result()
    thoughts, text = answer.reasoning.strip(), answer.text.strip()
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    if answer.is_cut or bool(thoughts) != thinking or not (text or calls):
        return None
    content = f"{THINK_OPEN}{thoughts}{THINK_CLOSE}{text}" if thinking else text
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _row(conversation: RehearsalConversation, answer: dict[str, Any]) -> dict[str, Any]:
    row = {
        "prompt": list(conversation.history),
        "completion": [answer],
        "chat_template_kwargs": {"enable_thinking": conversation.thinking},
    }
    return row | ({"tools": conversation.tools} if conversation.tools else {})
