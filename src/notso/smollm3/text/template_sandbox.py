"""Execute chat templates in a sandbox.

A template is a program from an untrusted file. It runs in jinja2's immutable sandbox, with plain values and the few
functions that Hugging Face's templates rely on. The sandbox limits neither time nor memory, so `render_in_child` runs
unknown templates in a child process with hard limits.

The child process runs this file, which imports only notso.system from this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.debug  # would otherwise be imported at the first error, when the child can no longer open files
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

if __name__ == "__main__":  # a program started by path does not have this package in sys.path
    sys.path.append(str(Path(__file__).parents[3]))

from notso.system.confinement import ConfinedProcess, ConfinedWorkError, Limits, Rights, confine

CHILD_LIMITS = Limits(cpu_s=1, memory_bytes=256 * 2**20, wall_s=30, answer_bytes=256 * 2**20)
CHILD_OUTPUT_CHARACTERS = 2**20

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

Variables = Mapping[str, Any]
T = TypeVar("T")


class SandboxFailure(Exception):
    """A template failed, raised an exception on purpose, or exceeded a limit."""


class GenerationTag(Extension):
    """The `{% generation %}` tag, which marks training targets. Its contents are printed as usual."""

    tags = {"generation"}  # noqa: RUF012 - declared as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class NamedUndefined(jinja2.Undefined):
    """Undefined value. An undefined name can be tested but not used; a missing key yields empty text."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._used() or super().__str__()

    def __iter__(self) -> Iterator[Any]:
        self._used()
        return super().__iter__()

    def __len__(self) -> int:
        self._used()
        return super().__len__()

    def __contains__(self, item: object) -> bool:
        return False

    def _used(self) -> str:
        if self._undefined_obj is missing:
            raise self._undefined_exception(self._undefined_message)
        return ""


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Outside the child, call only for known templates. Raises SandboxFailure."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        undefined=NamedUndefined,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    del environment.globals["lipsum"]
    return _convert_errors(lambda: environment.from_string(source))


def render_in_process(template: jinja2.Template, variables: Variables, day: date) -> str:
    """Render in this process with the date `day`. Raises SandboxFailure."""
    return _convert_errors(lambda: template.render({**variables, "strftime_now": _strftime_for(day)}))


def render_in_child(source: str, batch: Sequence[Variables], day: date) -> list[str]:
    """Render all sets of variables in one child process within CHILD_LIMITS. Raises SandboxFailure."""
    request = json.dumps({"source": source, "batch": list(batch), "day": day.isoformat()})
    try:
        answer = json.loads(ConfinedProcess((str(Path(__file__).resolve()),), request.encode(), CHILD_LIMITS).answer())
    except ConfinedWorkError as error:
        raise SandboxFailure(str(error)) from None
    if "failure" in answer:
        raise SandboxFailure(answer["failure"])
    return list(answer["texts"])


def main() -> None:
    """Render a batch in the child."""
    request = json.loads(sys.stdin.buffer.read())
    # On first use, `\N` escapes, `wordwrap` and `striptags` import modules, for which files must be opened.
    compile_template(r"{{ '\N{BULLET}' | wordwrap | striptags }}").render()
    confine(Rights.COMPUTE, CHILD_LIMITS)
    try:
        template = compile_template(request["source"])
        day = datetime.fromisoformat(request["day"])
        answer: dict[str, Any] = {"texts": [_render_capped(template, values, day) for values in request["batch"]]}
    except SandboxFailure as failure:
        answer = {"failure": str(failure)}
    sys.stdout.buffer.write(json.dumps(answer).encode())


def _render_capped(template: jinja2.Template, variables: Variables, day: date) -> str:
    def collect() -> str:
        pieces, room = [], CHILD_OUTPUT_CHARACTERS
        for piece in template.generate({**variables, "strftime_now": _strftime_for(day)}):
            room -= len(piece)
            if room < 0:
                raise SandboxFailure(f"it printed more than {CHILD_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    return _convert_errors(collect)


def _convert_errors(work: Callable[[], T]) -> T:
    try:
        return work()
    except SandboxFailure:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise SandboxFailure(f"line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise SandboxFailure(str(error)) from error
    except MemoryError:
        raise SandboxFailure("it ran out of memory") from None
    except Exception as error:  # templates can raise any Python exception
        raise SandboxFailure(f"{type(error).__name__}: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Writes JSON as in transformers, whereas jinja2's own filter escapes characters for HTML.
    if isinstance(value, jinja2.Undefined):
        str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_for(day: date) -> Callable[[str], str]:
    # The names of days and months are English, whatever the locale.
    moment = day if isinstance(day, datetime) else datetime(day.year, day.month, day.day)
    names = {
        "B": MONTHS[day.month - 1],
        "b": MONTHS[day.month - 1][:3],
        "A": WEEKDAYS[day.weekday()],
        "a": WEEKDAYS[day.weekday()][:3],
        "Y": f"{day.year:04d}",
        "p": "AM" if moment.hour < 12 else "PM",
        "%": "%",
    }
    numbers = "dmyjHIMSuwUVWG"

    def strftime_now(pattern: str) -> str:
        pieces = []
        characters = iter(str(pattern))
        for character in characters:
            if character != "%":
                pieces.append(character)
                continue
            directive = next(characters, "")
            if directive in names:
                pieces.append(names[directive])
            elif directive and directive in numbers:
                pieces.append(moment.strftime(f"%{directive}"))
            else:
                raise jinja2.TemplateError(f"strftime_now does not support %{directive}")
        return "".join(pieces)

    return strftime_now


if __name__ == "__main__":
    main()
