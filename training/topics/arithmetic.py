"""Arithmetic with small numbers; the reasoning contains the written steps."""

from __future__ import annotations

from random import Random

from training.topics.base import Context, Turn, ask

_ADD = [
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=",
    "what is {a} + {b}",
    "what is {a} plus {b}",
    "what's {a}+{b}",
    "add {a} and {b}",
    "how much is {a} + {b}",
    "how much is {a} and {b}",
    "{a} plus {b}",
    "compute {a} + {b}",
    "calculate {a} + {b}",
    "the sum of {a} and {b}",
    "what is the sum of {a} and {b}",
    "what do you get if you add {a} and {b}",
    "can you add {a} and {b}",
    "please add {a} to {b}",
    "solve {a} + {b}",
    "what does {a} + {b} make",
    "give me {a} + {b}",
    "{a} and {b} together",
]
_SUB = [
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "what is {a} - {b}",
    "what is {a} minus {b}",
    "what's {a}-{b}",
    "subtract {b} from {a}",
    "how much is {a} - {b}",
    "{a} minus {b}",
    "compute {a} - {b}",
    "calculate {a} - {b}",
    "take {b} from {a}",
    "what is {a} less {b}",
    "what is the difference of {a} and {b}",
]
_MUL = [
    "{a} * {b}",
    "{a} x {b}",
    "{a}*{b}",
    "what is {a} times {b}",
    "{a} times {b}",
    "multiply {a} by {b}",
    "what is {a} * {b}",
    "compute {a} * {b}",
    "how much is {a} times {b}",
]
_THINGS = [
    "apples",
    "books",
    "coins",
    "pens",
    "cups",
    "eggs",
    "cards",
    "stones",
    "tickets",
    "balls",
    "stamps",
    "flowers",
]
_MORE = [
    "i have {a} {t} and buy {b} more. how many {t} do i have now",
    "there are {a} {t} and {b} more come. how many are there",
    "tom has {a} {t} and anna has {b} {t}. how many {t} do they have together",
    "a box holds {a} {t}, another holds {b} {t}. how many {t} in all",
    "i found {a} {t} today and {b} {t} yesterday. how many is that",
]
_LESS = [
    "i have {a} {t} and give away {b}. how many {t} are left",
    "there are {a} {t} and {b} are taken. how many are left",
    "tom has {a} {t} and loses {b}. how many {t} does he have",
    "i had {a} {t} and sold {b} of them. how many {t} do i still have",
]


def is_held_out(a: int, b: int) -> bool:
    """Return whether an addition is held out for the score: about one in ten pairs."""
    return (a * 7919 + b * 104729) % 97 < 10


def add_steps(a: int, b: int) -> str:
    """Return the steps of written addition, beginning with the ones."""
    names = ("ones", "tens", "hundreds", "thousands")
    lines, carry, out = [f"{a} + {b}"], 0, ""
    width = max(len(str(a)), len(str(b)))
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        terms = f"{x} + {y}" + (f" + {carry}" if place else "")
        if place == width - 1:
            out = f"{total}{out}"
            lines.append(f"{names[place]}: {terms} = {total}")
        else:
            out = f"{total % 10}{out}"
            carry = total // 10
            lines.append(f"{names[place]}: {terms} = {total}, write {total % 10}, carry {carry}")
    return "\n".join([*lines, f"result: {out}"])


def sub_steps(a: int, b: int) -> str:
    """Return the steps of written subtraction of b from a >= b."""
    names = ("ones", "tens", "hundreds")
    lines, borrow, out = [f"{a} - {b}"], 0, ""
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        terms = f"{x} - {y}" + (f" - {borrow}" if place else "")
        left = x - y - borrow
        if left < 0:
            lines.append(f"{names[place]}: {terms}, borrow, 10 + {terms} = {left + 10}")
            left, borrow = left + 10, 1
        else:
            lines.append(f"{names[place]}: {terms} = {left}, no borrow")
            borrow = 0
        out = f"{left}{out}"
    return "\n".join([*lines, f"result: {int(out)}"])


def mul_steps(a: int, b: int) -> str:
    """Return the steps of a product of a number below 100 and a digit."""
    if a < 10:
        return f"{a} * {b} = {a * b}"
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n{tens * b} + {ones * b} = {a * b}"
    return f"{a} * {b}\n{steps}\nresult: {a * b}"


def _number(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def addition(rng: Random, context: Context) -> list[Turn]:
    """Ask for a + b, mostly of two digits and never a held-out pair."""
    while True:
        digits = rng.choices([(2, 2), (1, 1), (1, 2), (2, 1), (3, 2), (3, 3), (2, 3)], [70, 6, 7, 7, 3, 4, 3])[0]
        a, b = _number(rng, digits[0]), _number(rng, digits[1])
        if not is_held_out(a, b):
            break
    if rng.random() < 0.15:
        thing = rng.choice(_THINGS)
        question = rng.choice(_MORE).format(a=a, b=b, t=thing)
        return [
            Turn("user", ask(question, rng, typos=False)),
            Turn("assistant", f"{a} + {b} = {a + b}", add_steps(a, b)),
        ]
    return [
        Turn("user", ask(rng.choice(_ADD).format(a=a, b=b), rng, typos=False)),
        Turn("assistant", f"{a} + {b} = {a + b}", add_steps(a, b)),
    ]


def subtraction(rng: Random, context: Context) -> list[Turn]:
    """Ask for a - b, of at most two digits and with a >= b."""
    a, b = sorted((_number(rng, 2), _number(rng, rng.choice([1, 2, 2]))), reverse=True)
    answer = Turn("assistant", f"{a} - {b} = {a - b}", sub_steps(a, b))
    if rng.random() < 0.15:
        return [Turn("user", ask(rng.choice(_LESS).format(a=a, b=b, t=rng.choice(_THINGS)), rng, typos=False)), answer]
    return [Turn("user", ask(rng.choice(_SUB).format(a=a, b=b), rng, typos=False)), answer]


def product(rng: Random, context: Context) -> list[Turn]:
    """Ask for a product of a number of one or two digits and a digit."""
    a = _number(rng, rng.choice([1, 1, 2]))
    b = rng.randrange(10)
    return [
        Turn("user", ask(rng.choice(_MUL).format(a=a, b=b), rng, typos=False)),
        Turn("assistant", f"{a} * {b} = {a * b}", mul_steps(a, b)),
    ]


def compare(rng: Random, context: Context) -> list[Turn]:
    """Ask for the bigger or smaller number, for even or odd, or for the next number."""
    a, b = rng.sample(range(100), 2)
    kind = rng.randrange(4)
    if kind == 0:
        question = rng.choice(
            [
                "which is bigger, {a} or {b}",
                "is {a} or {b} bigger",
                "what is larger, {a} or {b}",
                "the bigger of {a} and {b}",
            ]
        )
        text, think = f"{max(a, b)} is bigger than {min(a, b)}.", f"I compare the tens of {a} and {b}, then the ones."
    elif kind == 1:
        question = rng.choice(["which is smaller, {a} or {b}", "is {a} or {b} smaller", "what is less, {a} or {b}"])
        text, think = f"{min(a, b)} is smaller than {max(a, b)}.", f"I compare the tens of {a} and {b}, then the ones."
    elif kind == 2:
        question = rng.choice(["is {a} even or odd", "is {a} an even number", "is {a} odd", "even or odd: {a}"])
        word = "odd" if a % 2 else "even"
        text, think = f"{a} is {word}.", f"The last digit is {a % 10}, and {a % 10} is {word}."
    else:
        question = rng.choice(["what comes after {a}", "which number follows {a}", "what is the next number after {a}"])
        text, think = f"After {a} comes {a + 1}.", f"{a} + 1 = {a + 1}"
    return [Turn("user", ask(question.format(a=a, b=b), rng, typos=False)), Turn("assistant", text, think)]


_SEVERAL = ["{x}", "add: {x}", "compute {x}", "what are {x}", "several sums: {x}", "solve these: {x}"]


def several_sums(rng: Random, context: Context) -> list[Turn]:
    """Ask for several sums of digits, which are the steps of written addition."""
    sums: list[tuple[str, int]] = []
    for _ in range(rng.randrange(4, 11)):
        terms = [rng.randrange(10), rng.randrange(10)]
        if rng.random() < 0.5:
            terms.append(rng.randrange(2))
        sums.append((" + ".join(str(t) for t in terms), sum(terms)))
    question = rng.choice(_SEVERAL).format(x=", ".join(text for text, _ in sums))
    answer = ", ".join(f"{text} = {value}" for text, value in sums)
    return [Turn("user", ask(question, rng, typos=False)), Turn("assistant", answer, "These are several small sums.")]
