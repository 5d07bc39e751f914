"""Unreviewed templates: what they may print, and what they must not do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from typing import Any

import pytest

from notso.smollm3.text import template_sandbox
from notso.smollm3.text.template_sandbox import SandboxFailure, compile_template, render_in_child, render_in_process

DAY = date(2025, 7, 8)


def both(source: str, **variables: Any) -> str:
    here = render_in_process(compile_template(source), variables, DAY)
    assert render_in_child(source, [variables], DAY) == [here]
    return here


RELIED_ON = [
    (
        "{{ strftime_now('%d %B %Y, %A %a %b %m %y %j %H:%M %%') }}",
        "08 July 2025, Tuesday Tue Jul 07 25 189 00:00 %",
    ),
    ("{{ {'b': '<é\"', 'a': [1, none, true]} | tojson }}", '{"b": "<é\\"", "a": [1, null, true]}'),
    ("{{ {'b': 'é', 'a': [2, 3]} | tojson(true, separators=(',', ':')) }}", '{"b":"\\u00e9","a":[2,3]}'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
    ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
    ("a{% generation %}b{{ n }}{% endgeneration %}c", "ab7c"),
    ("{% generation %}{% set n = 8 %}{% endgeneration %}{{ n }}", "7"),
    ("{% if n %}\n  {% set ns = namespace(x=1) %}\n{{ ns.x }}\n{% endif %}\n", "1\n"),
    (
        "{{ undefined_name is defined }}|{{ 'x' in undefined_name }}|{{ undefined_name == 'x' }}",
        "False|False|False",
    ),
    ("{% if undefined_name and undefined_name.x %}a{% endif %}{{ undefined_name | default('b') }}", "b"),
    ("{% set x = undefined_name or 'c' %}{{ x }}{{ message.name }}{% for y in message.parts %}{% endfor %}", "c"),
    ("{{ '<&>' }}", "<&>"),
    # These import modules on first use.
    ("{{ 'a b' | wordwrap(1) }}", "a\nb"),
    ("{{ '<i>a</i> &lt; b' | striptags }}", "a < b"),
    ("{{ '\\N{BULLET}\\u2022' }}", "••"),
]
NAMES = [
    *("{{ user_name }}", "{{ 'a' ~ user_name }}", "{{ 'a' + user_name }}", "{{ user_name | trim }}"),
    *("{% for each in user_name %}{% endfor %}", "{{ user_name | length }}", "{{ user_name.first }}"),
    *("{% set x = user_name %}{{ x }}", "{{ user_name | tojson }}", "{{ [user_name] | join }}"),
    "{% if false %}{% set user_name = 'a' %}{% endif %}{{ user_name }}",
]
FORBIDDEN = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{% set x = messages.append('x') %}",
    "{% set x = messages[0].update({'a': 1}) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ lipsum() }}",
    "{{ range(10**9) | list }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ strftime_now('%c') }}",
    "{{ strftime_now('%999999999d') }}",
    "{{ strftime_now('%') }}",
    "{% if %}",
    "{{ raise_exception('no') }}",
]
"""A child process renders some of these by default; this process, which is a hundred times as fast, renders all."""


@pytest.mark.parametrize(("source", "printed"), RELIED_ON)
def test_features_of_official_templates_work_in_process(source: str, printed: str) -> None:
    assert render_in_process(compile_template(source), {"n": 7, "message": {"role": "user"}}, DAY) == printed


@pytest.mark.parametrize(("source", "printed"), RELIED_ON)
def test_features_of_official_templates_are_supported(source: str, printed: str) -> None:
    assert both(source, n=7, message={"role": "user"}) == printed


@pytest.mark.parametrize("source", NAMES)
def test_undefined_name_is_an_error_in_process(source: str) -> None:
    with pytest.raises(SandboxFailure, match="'user_name' is undefined"):
        render_in_process(compile_template(source), {}, DAY)


@pytest.mark.parametrize("source", NAMES)
def test_undefined_variable_is_named_in_the_error(source: str) -> None:
    for render in (
        lambda: render_in_process(compile_template(source), {}, DAY),
        lambda: render_in_child(source, [{}], DAY),
    ):
        with pytest.raises(SandboxFailure, match="'user_name' is undefined"):
            render()


def test_render_apart_renders_a_batch() -> None:
    assert render_in_child("{{ n }}é", [{"n": 1}, {"n": "👩"}], DAY) == ["1é", "👩é"]


def test_strftime_now_with_datetime_formats_hours() -> None:
    moment = datetime(2025, 7, 8, 15, 4)
    assert render_in_process(compile_template("{{ strftime_now('%H:%M %I %p') }}"), {}, moment) == "15:04 03 PM"


OUTCOMES = {
    *("access to attribute ", "'lipsum' is undefine", "OverflowError: Range", "RecursionError: maxi"),
    *("strftime_now does no", "line 1: Expected an ", "no", "TypeError: no loader", "'dict object' has no ", ""),
}


def outcome(render: Callable[[], str]) -> str:
    try:
        return render()
    except SandboxFailure as failure:
        return str(failure)[:20]


@pytest.mark.parametrize("source", FORBIDDEN)
def test_forbidden_template_operations_fail_in_process(source: str) -> None:
    """It fails, or the attribute is undefined and prints nothing."""
    variables = {"messages": [{"role": "user", "content": "hi"}]}
    assert outcome(lambda: render_in_process(compile_template(source), variables, DAY)) in OUTCOMES
    assert variables == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("source", FORBIDDEN)
def test_unsafe_template_operations_are_prevented(source: str) -> None:
    """The child process does the same."""
    variables = {"messages": [{"role": "user", "content": "hi"}]}
    here = outcome(lambda: render_in_process(compile_template(source), variables, DAY))
    assert outcome(lambda: render_in_child(source, [variables], DAY)[0]) == here
    assert here in OUTCOMES


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'A' * 10**9 }}", "out of memory"),
        ("{{ ('A' * n) * n }}", "out of memory"),
        ("{{ '%1000000000d' % n }}", "out of memory"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "1 s of CPU|more than 30 s",
        ),
        ("{% for i in range(100000) %}{{ 'A' * 1000 }}{% endfor %}", "more than 1048576 characters"),
    ],
)
def test_template_bombs_are_stopped_early(source: str, said: str) -> None:
    with pytest.raises(SandboxFailure, match=said):
        render_in_child(source, [{"n": 10**5}], DAY)


def test_output_up_to_the_limit_is_accepted() -> None:
    limit = template_sandbox.CHILD_OUTPUT_CHARACTERS
    assert render_in_child("{{ text }}", [{"text": "é" * limit}], DAY) == ["é" * limit]
    with pytest.raises(SandboxFailure, match="more than"):
        render_in_child("{{ text }}", [{"text": "é" * (limit + 1)}], DAY)


def test_child_process_that_exceeds_its_time_limit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(template_sandbox.CHILD_LIMITS, wall_s=0.01)
    monkeypatch.setattr(template_sandbox, "CHILD_LIMITS", limits)
    with pytest.raises(SandboxFailure, match=r"more than 0\.01 s"):
        render_in_child("x", [{}], DAY)


def test_confined_child_cannot_open_files() -> None:
    """The child process is confined in addition to the Jinja2 sandbox: an escaped template still cannot open files."""
    program = (
        "from notso.system.confinement import Rights, confine\n"
        "from notso.smollm3.text.template_sandbox import CHILD_LIMITS\n"
        "confine(Rights.COMPUTE, CHILD_LIMITS); open('/etc/hostname')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Operation not permitted" in done.stderr or "Too many open files" in done.stderr
