"""Calculate exactly with fractions, and limit the size of all intermediate results. The grammar of expressions:

sum     = product (('+' | '-') product)*
product = signed (('*' | '/' | '//' | '%') signed)*
signed  = ('+' | '-') signed | power
power   = atom (('**' | '^') signed)?
atom    = number | 'pi' | name '(' sum (',' sum)* ')' | '(' sum ')'
"""

from __future__ import annotations

import asyncio
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any

from notso.web.tools.chat_tool import ChatTool, ToolContext, arguments_schema
from notso.web.values.errors import ToolError

MAX_CHARACTERS = 1_000
MAX_DEPTH = 60
MAX_BITS = 8_192  # maximum size of a numerator or denominator (about 2,466 decimal digits)
MAX_FACTORIAL = 500
MAX_DECIMALS = 40  # a result with more decimal places is rounded
ROUNDED_DIGITS = 20  # significant digits of a rounded result
INNER_DIGITS = 60  # irrational roots are computed to 2 * INNER_DIGITS decimal places

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([a-z]+)|(\*\*|//|[-+*/%^(),]))")
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494")


@dataclass(frozen=True, slots=True)
class _Number:
    value: Fraction
    exact: bool = True  # False if the value depends on a rounded root or constant


def calculate(expression: str) -> str:
    """Return the value of an expression: an integer, a decimal, or a decimal marked as rounded.

    Raises ToolError.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(expression.translate(_SAME).rstrip("=? \n\t")))
    return _format_number(parser.parse())


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            wrong = text[position:].strip()[:1]
            raise ToolError(f"{wrong!r} is not supported; use numbers, + - * / // % ^ and {_names()}")
        tokens.append(match[1] or match[2] or match[3])
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def parse(self) -> _Number:
        if not self._tokens:
            raise ToolError("the expression is empty")
        number = self._sum()
        if self._at < len(self._tokens):
            raise ToolError(f"{self._tokens[self._at]!r} is not expected here")
        return number

    def _next(self, *signs: str) -> str:
        if self._at < len(self._tokens) and self._tokens[self._at] in signs:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""

    def _expect(self, sign: str) -> None:
        if not self._next(sign):
            raise ToolError(f"{sign!r} is missing")

    def _sum(self) -> _Number:
        left = self._product()
        while sign := self._next("+", "-"):
            left = _apply_operator(sign, left, self._product())
        return left

    def _product(self) -> _Number:
        left = self._signed()
        while sign := self._next("*", "/", "//", "%"):
            left = _apply_operator(sign, left, self._signed())
        return left

    def _signed(self) -> _Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested more than {MAX_DEPTH} levels deep")
        sign = self._next("+", "-")
        number = self._signed() if sign else self._power()
        self._depth -= 1
        return _Number(-number.value, number.exact) if sign == "-" else number

    def _power(self) -> _Number:
        base = self._atom()
        return _raise_to_power(base, self._signed()) if self._next("**", "^") else base

    def _atom(self) -> _Number:
        if self._next("("):
            number = self._sum()
            self._expect(")")
            return number
        if self._at == len(self._tokens):
            raise ToolError("the expression is incomplete")
        token = self._tokens[self._at]
        self._at += 1
        if token[0].isdigit() or token[0] == ".":
            return _literal(token)
        if token == "pi":
            return _Number(_PI, exact=False)
        if token not in _FUNCTIONS:
            message = (
                f"{token!r} is not supported; available: {_names()}" if token.isalpha() else f"{token!r} is misplaced"
            )
            raise ToolError(message)
        self._expect("(")
        arguments = [self._sum()]
        while self._next(","):
            arguments.append(self._sum())
        self._expect(")")
        least, most, function = _FUNCTIONS[token]
        if not least <= len(arguments) <= most:
            raise ToolError(f"{token} does not take {len(arguments)} numbers")
        result = function([each.value for each in arguments])
        return _check_size(result.value, result.exact and all(each.exact for each in arguments))


def _literal(token: str) -> _Number:
    _, _, exponent = token.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_BITS // 4:
        raise ToolError("the numbers become too large")
    return _check_size(Fraction(token))


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def _apply_operator(sign: str, left: _Number, right: _Number) -> _Number:
    try:
        value = Fraction(_OPERATORS[sign](left.value, right.value))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    return _check_size(value, left.exact and right.exact)


def _raise_to_power(base: _Number, exponent: _Number) -> _Number:
    exact = base.exact and exponent.exact
    if exponent.value == Fraction(1, 2):
        root = _root([base.value])
        return _Number(root.value, root.exact and exact)
    if exponent.value.denominator != 1:
        raise ToolError("only integer powers and square roots are supported")
    power = int(exponent.value)
    if base.value == 0 and power < 0:
        raise ToolError("division by zero")
    bits = max(base.value.numerator.bit_length(), base.value.denominator.bit_length())
    # Estimate the size before computing the power, which might take up all memory.
    if abs(base.value) != 1 and base.value != 0 and bits * abs(power) > 2 * MAX_BITS:
        raise ToolError("the numbers become too large")
    return _check_size(base.value**power, exact)


def _check_size(value: Fraction, exact: bool = True) -> _Number:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the numbers become too large")
    return _Number(value, exact)


def _root(numbers: Sequence[Fraction]) -> _Number:
    value = numbers[0]
    if value < 0:
        raise ToolError("a negative number has no square root")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return _Number(Fraction(top, bottom))
    scale = 10 ** (2 * INNER_DIGITS)
    return _Number(Fraction(math.isqrt(value.numerator * scale * scale // value.denominator), scale), exact=False)


def _rounded(numbers: Sequence[Fraction]) -> _Number:
    places = numbers[1] if len(numbers) > 1 else Fraction(0)
    if places.denominator != 1 or abs(places) > MAX_DECIMALS:
        raise ToolError(f"round takes at most {MAX_DECIMALS} places")
    return _Number(Fraction(round(numbers[0], int(places))))


def _factorial(numbers: Sequence[Fraction]) -> _Number:
    number = numbers[0]
    if number.denominator != 1 or not 0 <= number <= MAX_FACTORIAL:
        raise ToolError(f"factorial takes an integer from 0 to {MAX_FACTORIAL}")
    return _Number(Fraction(math.factorial(int(number))))


def _integer_function(function: Callable[..., int]) -> Callable[[Sequence[Fraction]], _Number]:
    def apply(numbers: Sequence[Fraction]) -> _Number:
        if any(number.denominator != 1 for number in numbers):
            raise ToolError("integers are required")
        return _Number(Fraction(function(*(int(number) for number in numbers))))

    return apply


_FUNCTIONS: dict[str, tuple[int, int, Callable[[Sequence[Fraction]], _Number]]] = {
    "sqrt": (1, 1, _root),
    "abs": (1, 1, lambda numbers: _Number(abs(numbers[0]))),
    "round": (1, 2, _rounded),
    "floor": (1, 1, lambda numbers: _Number(Fraction(math.floor(numbers[0])))),
    "ceil": (1, 1, lambda numbers: _Number(Fraction(math.ceil(numbers[0])))),
    "min": (1, 50, lambda numbers: _Number(min(numbers))),
    "max": (1, 50, lambda numbers: _Number(max(numbers))),
    "gcd": (1, 50, _integer_function(math.gcd)),
    "lcm": (1, 50, _integer_function(math.lcm)),
    "factorial": (1, 1, _factorial),
}


def _names() -> str:
    return ", ".join([*_FUNCTIONS, "pi"])


def _format_number(number: _Number) -> str:
    value = number.value
    if number.exact and value.denominator == 1:
        return str(value.numerator)
    decimals = _decimals(value.denominator)
    if number.exact and decimals is not None:
        digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"
    context = Context(prec=ROUNDED_DIGITS, rounding=ROUND_HALF_EVEN, Emax=99_999, Emin=-99_999)
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    shown = format(rounded, "f") if -ROUNDED_DIGITS < rounded.adjusted() < ROUNDED_DIGITS else str(rounded)
    fraction = f"{value.numerator}/{value.denominator}"
    return f"{shown} (rounded; exactly {fraction})" if number.exact and len(fraction) <= 24 else f"{shown} (rounded)"


def _decimals(denominator: int) -> int | None:
    # Returns the number of decimal places of a reduced fraction with this denominator, or None if there are infinitely
    # many or more than MAX_DECIMALS.
    return next((places for places in range(MAX_DECIMALS + 1) if 10**places % denominator == 0), None)


async def _run(arguments: Mapping[str, Any], context: ToolContext) -> str:
    return await asyncio.to_thread(calculate, arguments["expression"])


CALCULATOR = ChatTool(
    name="calculator",
    description=(
        "Evaluate an arithmetic expression exactly: + - * / // % ^, parentheses, sqrt, abs, round, floor, ceil, min,"
        " max, gcd, lcm, factorial, pi."
    ),
    parameters=arguments_schema({"expression": ("string", "For example (2 + 3) * 4")}, "expression"),
    run=_run,
)
