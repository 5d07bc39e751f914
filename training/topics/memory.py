"""Facts about the user, and later questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.topics import words
from training.topics.base import Context, Turn, ask, expand


@dataclass(frozen=True)
class Item:
    """A fact about the user: phrasings of statement, reply, question and answer, in which {v} is the value."""

    key: str
    value: Callable[[Random], str]
    told: tuple[str, ...]
    reply: str
    asked: tuple[str, ...]
    recall: str
    label: str


ITEMS = (
    Item(
        "name",
        words.person_name,
        (
            "my name is {v}",
            "i am {v}",
            "i'm {v}",
            "call me {v}",
            "{hi|hello|hey}, i am {v}",
            "{hi|hello}, my name is {v}",
            "you can call me {v}",
            "{hi|hey}, i'm {v}",
            "my name is {v}, {remember that|do not forget it|what is yours}",
            "{hello|hi}! i am called {v}",
            "people call me {v}",
            "this is {v} {speaking|}",
            "the name is {v}",
        ),
        "Nice to meet you, {v}!",
        (
            "what is my name",
            "what's my name",
            "who am i",
            "do you remember my name",
            "what am i called",
            "do you know my name",
            "tell me my name",
            "say my name",
            "my name is what",
            "can you remember my name",
            "do you still know my name",
            "what did i say my name was",
        ),
        "Your name is {v}.",
        "your name",
    ),
    Item(
        "colour",
        lambda r: r.choice(words.COLOURS),
        (
            "my {favourite|favorite} {colour|color} is {v}",
            "i like the {colour|color} {v} {best|most|}",
            "i love {v}, it is my favourite colour",
            "{v} is my favourite {colour|color}",
            "the {colour|color} i like best is {v}",
        ),
        "{V} is a fine colour. I will remember it.",
        (
            "what is my {favourite|favorite} {colour|color}",
            "what's my favourite colour",
            "which {colour|color} do i like {best|}",
            "do you remember my {favourite|} {colour|color}",
            "what {colour|color} do i like",
            "tell me my favourite {colour|color}",
        ),
        "Your favourite colour is {v}.",
        "your favourite colour",
    ),
    Item(
        "pet",
        words.person_name,
        (
            "my {dog|cat|pet} is called {v}",
            "my {dog|cat|pet}'s name is {v}",
            "i have a {dog|cat|pet} {called|named} {v}",
            "the name of my {dog|cat|pet} is {v}",
        ),
        "{v} is a nice name for a pet!",
        (
            "what is my {pet|cat|dog} called",
            "what is the name of my {pet|cat|dog}",
            "what is my {pet|cat|dog}'s name",
            "do you remember my {pet|cat|dog}'s name",
            "who is my {pet|cat|dog}",
            "how is my {dog|cat|pet} called",
        ),
        "Your pet is called {v}.",
        "your pet",
    ),
    Item(
        "city",
        words.city_name,
        (
            "i live in {v}",
            "i am from {v}",
            "my home is {v}",
            "i come from {v}",
            "my city is {v}",
            "i moved to {v}",
            "i'm from {v}",
            "my home town is {v}",
        ),
        "{v} must be a nice place. I will remember it.",
        (
            "where do i live",
            "where am i from",
            "what city do i live in",
            "which city am i from",
            "what is my {city|home|home town}",
            "do you remember where i live",
            "where is my home",
            "do you know where i live",
        ),
        "You live in {v}.",
        "your home",
    ),
    Item(
        "age",
        lambda r: str(r.randrange(7, 99)),
        ("i am {v} years old", "my age is {v}", "i'm {v} years old", "i just turned {v}", "i am {v} years of age"),
        "{v} years, I will remember it.",
        (
            "how old am i",
            "what is my age",
            "do you remember {my age|how old i am}",
            "what's my age",
            "do you know how old i am",
            "tell me my age",
        ),
        "You are {v} years old.",
        "your age",
    ),
    Item(
        "job",
        lambda r: r.choice(words.JOBS),
        (
            "i work as a {v}",
            "my job is {v}",
            "i am a {v}",
            "i'm a {v}",
            "i am a {v} by trade",
            "i earn my money as a {v}",
        ),
        "Being a {v} sounds interesting. I will remember it.",
        (
            "what is my job",
            "what do i do",
            "what do i work as",
            "do you remember my job",
            "what's my job",
            "what work do i do",
            "do you know my job",
        ),
        "You work as a {v}.",
        "your job",
    ),
    Item(
        "food",
        lambda r: r.choice(words.FOODS),
        (
            "my favourite food is {v}",
            "i love {eating|to eat} {v}",
            "i like {eating|to eat} {v} {best|most|}",
            "my favorite food is {v}",
            "{v} is my favourite food",
        ),
        "{V} sounds tasty. I will remember it.",
        (
            "what is my {favourite|favorite} food",
            "what do i like to eat",
            "which food do i like {best|}",
            "do you remember my favourite food",
            "what's my favourite food",
        ),
        "Your favourite food is {v}.",
        "your favourite food",
    ),
    Item(
        "number",
        lambda r: str(r.randrange(1000)),
        (
            "my {lucky|favourite} number is {v}",
            "remember the number {v}",
            "my number is {v}",
            "please keep the number {v} in mind",
            "note the number {v}",
        ),
        "I will remember the number {v}.",
        (
            "what is my {lucky|favourite|} number",
            "which number did i tell you",
            "what was the number",
            "do you remember the number",
            "what number should you remember",
            "what's my {lucky|favourite|} number",
        ),
        "Your number is {v}.",
        "your number",
    ),
    Item(
        "word",
        lambda r: r.choice(words.PLAIN) if r.random() < 0.7 else words.made_up(r),
        (
            "remember the word {v}",
            "the {secret|code|pass} word is {v}",
            "please remember this word: {v}",
            "keep the word {v} in mind",
            "the password is {v}",
        ),
        "I will remember the word {v}.",
        (
            "what is the {secret|code|pass|} word",
            "which word did i tell you",
            "what was the word",
            "do you remember the word",
            "what word should you remember",
            "what is the password",
        ),
        "The word is {v}.",
        "the word",
    ),
    Item(
        "animal",
        lambda r: r.choice(words.ANIMALS),
        (
            "my favourite animal is the {v}",
            "the animal i like {best|most} is the {v}",
            "my favorite animal is a {v}",
            "i love the {v} most of all animals",
        ),
        "The {v} is a fine animal. I will remember it.",
        (
            "what is my {favourite|favorite} animal",
            "which animal do i like {best|}",
            "do you remember my favourite animal",
            "what animal do i like",
        ),
        "Your favourite animal is the {v}.",
        "your favourite animal",
    ),
)
_BY_KEY = {item.key: item for item in ITEMS}


def fill(pattern: str, value: str, rng: Random) -> str:
    text = expand(pattern.replace("{v}", "\0").replace("{V}", "\1"), rng)
    return text.replace("\0", value).replace("\1", value[:1].upper() + value[1:])


def _case_value(text: str, value: str, rng: Random) -> str:
    return text.replace(value, value.lower()) if rng.random() < 0.12 else text


def tell(rng: Random, context: Context) -> list[Turn]:
    """State a fact about the user, or change it."""
    item = rng.choices(ITEMS, [5, 3, 2, 2, 2, 2, 2, 2, 2, 1])[0]
    value = item.value(rng)
    if rng.random() < 0.1 and item.key in ("name", "pet", "city"):
        value = value.lower()
    old = context.memory.get(item.key)
    context.memory[item.key] = value
    text = ask(fill(rng.choice(item.told), value, rng), rng, typos=False, endings=False)
    if old and rng.random() < 0.6:
        text = rng.choice(["no, ", "actually ", "sorry, ", "wait, "]) + text
    text += rng.choice(["", "", ".", ".", "!"])
    return [
        Turn("user", text),
        Turn(
            "assistant",
            fill(item.reply, value, rng),
            f"The user tells me {item.label.replace('your', 'their')}: {value}.",
        ),
    ]


def tell_two(rng: Random, context: Context) -> list[Turn]:
    """State the name and another fact in one message."""
    name = words.person_name(rng)
    item = rng.choice(ITEMS[1:])
    value = item.value(rng)
    context.memory.update({"name": name, item.key: value})
    text = f"{fill(rng.choice(_BY_KEY['name'].told[:5]), name, rng)} and {fill(item.told[0], value, rng)}"
    text = text[:1].upper() + text[1:] if rng.random() < 0.5 else text
    return [
        Turn("user", text + rng.choice(["", ".", "!"])),
        Turn(
            "assistant",
            f"Nice to meet you, {name}! I will remember that.",
            f"The user tells me their name: {name}, and {item.label.replace('your', 'their')}: {value}.",
        ),
    ]


def recall(rng: Random, context: Context) -> list[Turn]:
    """Ask for a fact that was stated, or for one that was not."""
    known = list(context.memory)
    if known and rng.random() < 0.85:
        item = _BY_KEY[rng.choice(known)]
        value = context.memory[item.key]
        answer = Turn(
            "assistant",
            fill(item.recall, value, rng),
            f"The user told me {item.label.replace('your', 'their')}: {value}.",
        )
    else:
        item = rng.choice([i for i in ITEMS if i.key not in context.memory] or list(ITEMS))
        if item.key in context.memory:
            return recall(rng, context)
        answer = Turn(
            "assistant",
            f"You have not told me {item.label} yet.",
            f"The user has not told me {item.label.replace('your', 'their')}.",
        )
    question = expand(rng.choice(item.asked), rng)
    return [Turn("user", ask(question, rng)), answer]


_ALL = [
    "what do you know about me",
    "tell me {everything|all} you know about me",
    "what did i tell you {|about me}",
    "what have i told you",
]


def recall_all(rng: Random, context: Context) -> list[Turn]:
    """Ask for all stated facts; the answer has the first four, in order."""
    parts = [fill(_BY_KEY[k].recall, v, rng) for k, v in context.memory.items()]
    text = " ".join(parts[:4]) if parts else "You have not told me anything about you yet."
    return [
        Turn("user", ask(expand(rng.choice(_ALL), rng), rng)),
        Turn("assistant", text, "I look at what the user told me."),
    ]


_LAST = [
    "what did i just {say|ask|write}",
    "what was my last {question|message}",
    "what did i say before {this|that}",
    "repeat my last {question|message}",
]


def recall_last(rng: Random, context: Context) -> list[Turn]:
    """Ask for the previous user message, which the answer quotes."""
    text = f"You wrote: {context.last_user}" if context.last_user else "This is your first message."
    return [
        Turn("user", ask(expand(rng.choice(_LAST), rng), rng)),
        Turn("assistant", text, "I look at the last message of the user."),
    ]
