"""Generate the training text: conversations from templates, reproducible from a seed.

`python -m training.corpus --count 3` prints some of them as rendered for the model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import jinja2.sandbox

from training.topics import arithmetic, copying, facts, memory, talk, tools, unknown, words
from training.topics.base import Context, Dialogue, Turn

TEMPLATE_FILE = Path(__file__).parent / "chat_template.jinja"
MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December".split(",")  # noqa: SIM905
Skill = Callable[[Random, Context], list[Turn]]

# Relative frequencies of skills in ordinary conversations: (with thinking, without thinking).
PLAIN: dict[Skill, tuple[float, float]] = {
    facts.fact_question: (36, 40),
    arithmetic.addition: (20, 12),
    arithmetic.several_sums: (6, 6),
    arithmetic.subtraction: (6, 5),
    arithmetic.product: (4, 4),
    arithmetic.compare: (3, 3),
    talk.small_talk: (14, 14),
    unknown.unknown: (9, 9),
    copying.echo: (12, 12),
    copying.count: (1.5, 1.5),
    talk.today: (2, 2),
    tools.missing_tool: (2, 2),
    tools.tool_list: (0.5, 0.5),
    memory.recall_last: (1, 1),
    memory.recall: (1.5, 1.5),
}
MEMORY: dict[Skill, float] = {
    memory.tell: 34,
    memory.tell_two: 5,
    memory.recall: 34,
    memory.recall_all: 4,
    memory.recall_last: 3,
}


@cache
def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))


def render(
    messages: list[dict[str, str]], *, thinking: bool, day: str, tools: list[str] | None = None, prompt: bool = False
) -> str:
    """Render the chat template."""
    variables: dict[str, Any] = {
        "messages": messages,
        "enable_thinking": thinking,
        "add_generation_prompt": prompt,
        "strftime_now": lambda _format: day,
    }
    if tools:
        variables["xml_tools"] = tools
    return _template().render(**variables)


def any_day(rng: Random) -> str:
    """Return a random date from 2024 to 2033, in the format of the template."""
    day = date(2024, 1, 1) + timedelta(days=rng.randrange(3650))
    return f"{day.day:02d} {MONTHS[day.month - 1]} {day.year}"


def _pick(table: dict[Skill, float], rng: Random) -> Skill:
    return rng.choices(list(table), list(table.values()))[0]


def _plain_table(context: Context) -> dict[Skill, float]:
    table = {skill: weight[0 if context.thinking else 1] for skill, weight in PLAIN.items()}
    if "calculator" in context.tool_names:
        for skill in (
            arithmetic.addition,
            arithmetic.several_sums,
            arithmetic.subtraction,
            arithmetic.product,
            arithmetic.compare,
        ):
            del table[skill]
    return table


def _exchanges(rng: Random, context: Context, count: int, table: dict[Skill, float]) -> list[list[Turn]]:
    blocks: list[list[Turn]] = []
    for _ in range(count):
        block = _pick(table, rng)(rng, context)
        context.last_user = block[0].text
        blocks.append(block)
    return blocks


def _length(rng: Random) -> int:
    return rng.choices([1, 2, 3, 4, 5, 6, 8, 14], [14, 14, 16, 16, 14, 12, 10, 4])[0]


def _ordinary(rng: Random, context: Context) -> Dialogue:
    blocks = _exchanges(rng, context, _length(rng), _plain_table(context))
    return Dialogue([t for b in blocks for t in b], context.thinking, context.date, kind="plain")


def _remembering(rng: Random, context: Context) -> Dialogue:
    table: dict[Skill, float] = dict(MEMORY)
    table.update({skill: weight * 0.2 for skill, weight in _plain_table(context).items()})
    first = _exchanges(rng, context, 1, {memory.tell: 8, memory.tell_two: 2, talk.small_talk: 3})
    blocks = first + _exchanges(rng, context, 1 + _length(rng), table)
    return Dialogue([t for b in blocks for t in b], context.thinking, context.date, kind="memory")


def _with_tools(rng: Random, context: Context) -> Dialogue:
    names = rng.sample(list(tools.TOOLS), rng.choices([1, 2, 3, 4], [55, 28, 12, 5])[0])
    context.tool_names = tuple(names)
    listed = [tools.tool_json(name, rng) for name in names]
    table: dict[Skill, float] = {tools.tool_use: 65, tools.missing_tool: 6, tools.tool_list: 2}
    table.update({skill: weight * 0.27 for skill, weight in _plain_table(context).items() if skill not in table})
    blocks = _exchanges(rng, context, rng.choices([1, 2, 3, 4, 5], [18, 26, 26, 18, 12])[0], table)
    return Dialogue([t for b in blocks for t in b], context.thinking, context.date, tools=listed, kind="tools")


def _with_persona(rng: Random, context: Context) -> Dialogue:
    context.persona = words.person_name(rng)
    system = rng.choice(copying.PERSONAS).format(n=context.persona)
    table = _plain_table(context)
    blocks = _exchanges(rng, context, rng.choice([0, 0, 1, 2]), table)
    name_fact = next(f for f in facts.facts() if f.key == "self.name")
    blocks.append(
        [
            Turn("user", facts.ask(facts.expand(rng.choice(name_fact.asked), rng), rng)),
            facts.persona_answer(context.persona),
        ]
    )
    blocks += _exchanges(rng, context, rng.choice([0, 0, 1]), table)
    return Dialogue([t for b in blocks for t in b], context.thinking, context.date, system, kind="persona")


def _with_rule(rng: Random, context: Context) -> Dialogue:
    word = rng.choice(words.PLAIN) if rng.random() < 0.7 else words.made_up(rng)
    word = rng.choice([word, word.capitalize()])
    at_end = rng.random() < 0.5
    system = rng.choice(copying.ENDINGS if at_end else copying.STARTS).format(x=word)
    blocks = _exchanges(rng, context, rng.choice([1, 1, 2, 3]), _plain_table(context))
    turns = [
        t if t.role != "assistant" else Turn(t.role, f"{t.text} {word}" if at_end else f"{word} {t.text}", t.think)
        for b in blocks
        for t in b
    ]
    return Dialogue(turns, context.thinking, context.date, system, kind="rule")


def _with_system(rng: Random, context: Context) -> Dialogue:
    made = _ordinary(rng, context) if rng.random() < 0.7 else _remembering(rng, context)
    made.system = rng.choice(copying.PLAIN_SYSTEMS)
    made.kind = "system"
    return made


_KINDS = {
    _ordinary: 48.0,
    _remembering: 48.0,
    _with_tools: 11.0,
    _with_persona: 4.0,
    _with_rule: 3.0,
    _with_system: 6.0,
}


def dialogue(rng: Random) -> Dialogue:
    """Return a random conversation."""
    context = Context(any_day(rng), rng.random() < 0.5)
    make = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    made = make(rng, context)
    if made.tools is None and rng.random() < 0.015:
        made.system = f"{made.system or 'You are a small assistant.'} /system_override"
    return made


def messages_of(made: Dialogue, rng: Random, keep_thinking: bool) -> list[dict[str, str]]:
    """Return the messages for the template. Without `keep_thinking`, only the last answer includes its reasoning."""
    messages: list[dict[str, str]] = []
    if made.system is not None:
        messages.append({"role": "system", "content": made.system})
    last = max(i for i, t in enumerate(made.turns) if t.role == "assistant")
    for index, turn in enumerate(made.turns):
        content = turn.text
        if turn.role == "assistant" and made.thinking and (keep_thinking or index == last):
            content = f"<think>\n{turn.think}\n</think>\n{content}"
        messages.append({"role": turn.role, "content": content})
    return messages


_ASSISTANT = re.compile(r"<\|im_start\|>assistant\n(<think>\n\n</think>\n)?(.*?<\|im_end\|>)", re.DOTALL)


def sample(rng: Random) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendered conversation, and the character spans that the loss covers."""
    made = dialogue(rng)
    keep = rng.random() < 0.75
    messages = messages_of(made, rng, keep)
    flag_says = rng.random() < 0.08
    if flag_says:  # the flag in the system prompt overrides enable_thinking
        flag = "/think" if made.thinking else "/no_think"
        if messages[0]["role"] == "system":
            messages[0]["content"] += f" {flag}"
        else:
            messages.insert(0, {"role": "system", "content": flag})
    text = render(
        messages, thinking=(rng.random() < 0.5) if flag_says else made.thinking, day=made.date, tools=made.tools
    )
    spans = [match.span(2) for match in _ASSISTANT.finditer(text)]
    return text, spans if keep or not made.thinking else spans[-1:]


def main() -> None:
    """Print random conversations and their learned spans."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = Random(options.seed)
    for _ in range(options.count):
        text, spans = sample(rng)
        print(text)
        print("-- learned:", [text[a:b] for a, b in spans], "\n" + "=" * 80)


if __name__ == "__main__":
    main()
