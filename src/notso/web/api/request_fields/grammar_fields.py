"""The fields that say what an answer must be, as llama.cpp and vLLM spell them, for chats and plain completions."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field

from notso.smollm3 import Grammar
from notso.web.api.request_fields.field_reader import invalid
from notso.web.api.request_fields.fields import Fields, Notes, Text, refused, works
from notso.web.api.request_fields.request_checks import schema_grammar
from notso.web.api.request_fields.sampling_fields import SAMPLING_NOTES, SamplingFields

MAX_GRAMMAR_CHOICES = 1_000

Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES, fail_fast=True)]
Schema = dict[str, Any] | Text
"""A JSON schema, or one as JSON text."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class StructuredOutputs(Fields):
    """vLLM's: one of them."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class GrammarFields(SamplingFields):
    """One of them at most. A `grammar` is GBNF where it has rules in that notation (`::=`), else Lark."""

    grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None


GRAMMAR_NOTES: Notes = SAMPLING_NOTES | {
    "grammar": works("GBNF (llama.cpp's notation), or Lark's where no rule has `::=`; the answer follows it"),
    "json_schema": works("llama.cpp's: a JSON schema, see structured-output.md"),
    "regex": works("a regular expression that the whole answer matches"),
    "choice": works(f"a list of up to {MAX_GRAMMAR_CHOICES:,} texts, of which the answer is one"),
    "guided_json": works("vLLM's name of `json_schema`"),
    "guided_regex": works("vLLM's name of `regex`"),
    "guided_choice": works("vLLM's name of `choice`"),
    "guided_grammar": works("vLLM's name of `grammar`"),
    "structured_outputs": works("vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`"),
    "guided_decoding_backend": refused("leave it out: there is one"),
    "grammar_lazy": refused("leave it out: a grammar holds from the answer's first token"),
    "grammar_triggers": refused("leave it out: a grammar holds from the answer's first token"),
    "structural_tag": refused("give tools with strict: true"),
}
"""And those of the sampling."""


def grammar_of(fields: GrammarFields, format_grammar: Grammar | None = None) -> tuple[Grammar | None, str]:
    """What the answer must be, and the field that says so; `format_grammar` is what `response_format` says.

    Raises ApiError (400) where two say something, or one says it wrongly.
    """
    asked = fields.structured_outputs
    given: dict[str, Grammar | None] = {
        "response_format": format_grammar,
        "grammar": _written(fields.grammar),
        "json_schema": _schema("json_schema", fields.json_schema),
        "regex": _expression(fields.regex),
        "choice": _one_of(fields.choice),
        "guided_json": _schema("guided_json", fields.guided_json),
        "guided_regex": _expression(fields.guided_regex),
        "guided_choice": _one_of(fields.guided_choice),
        "guided_grammar": _written(fields.guided_grammar),
    }
    if asked is not None:
        given |= {
            "structured_outputs.json": _schema("structured_outputs.json", asked.json_),
            "structured_outputs.regex": _expression(asked.regex),
            "structured_outputs.choice": _one_of(asked.choice),
            "structured_outputs.grammar": _written(asked.grammar),
            "structured_outputs.json_object": Grammar("json_object") if asked.json_object else None,
        }
    found = [(grammar, name) for name, grammar in given.items() if grammar is not None]
    if len(found) > 1:
        raise invalid(
            found[1][1], f"{found[0][1]} and {found[1][1]} both say what the answer must be: give one of them"
        )
    return found[0] if found else (None, "response_format")


def _written(source: str | None) -> Grammar | None:
    if not source:  # llama.cpp's clients send an empty one for none
        return None
    return Grammar("gbnf" if _GBNF_RULE.search(source) else "lark", source)


def _schema(param: str, schema: Schema | None) -> Grammar | None:
    if schema is None or isinstance(schema, str):
        return Grammar("json_schema", schema) if schema else None
    return schema_grammar(param, schema)


def _expression(expression: str | None) -> Grammar | None:
    return Grammar("regex", expression) if expression else None


def _one_of(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar("choice", json.dumps(choices))
