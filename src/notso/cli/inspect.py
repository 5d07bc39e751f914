"""`notso inspect`: what a GGUF file holds."""

from __future__ import annotations

from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso inspect SmolLM3-Q4_K_M.gguf
  notso inspect SmolLM3-Q4_K_M.gguf --tensors --json"""


def inspect_file(
    file: options.File,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Show what a GGUF file holds, and what it needs.

    Architecture, tensors by type, NoPE and Q6_K layers, tokenizer, template, bytes read per token, KV bytes per token,
    and the context that fits this machine's memory.
    """
    from notso.smollm3.inspection import inspect_model

    report = inspect_model(file)
    terminal.say_json(report)
