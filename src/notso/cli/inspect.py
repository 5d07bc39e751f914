"""`notso inspect`: show metadata, tensors and memory needs of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from notso.cli import exit_codes, options, terminal
from notso.cli.engines import model_file

if TYPE_CHECKING:
    from notso.smollm3.diagnostics.inspection import Entry, Inspection, RunInfo, TokenizerInfo

EXAMPLES = """\
  notso inspect SmolLM3-Q4_K_M.gguf
  notso inspect SmolLM3-Q4_K_M.gguf --tensors --json"""


def inspect(
    file: options.File,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Show metadata, tensors and memory needs of a GGUF file.

    Shows the architecture, tensors by type, layers without rotary position embedding (NoPE), layers in Q6_K, tokenizer,
    chat template, size of the weights, size of the KV cache per token, and the context length that fits in this
    machine's memory. The exit code is 3 if the file cannot be run.
    """
    from notso.smollm3.diagnostics.inspection import inspect_file

    info = inspect_file(model_file(file, silent=as_json) or file)
    if as_json:
        terminal.print_json(info.as_dict(tensors=tensors))
    else:
        terminal.print_lines(describe(info, tensors=tensors))
    if info.problem is not None:
        terminal.warn(f"This file cannot be run: {info.problem}")
        raise typer.Exit(exit_codes.BAD_MODEL)


def describe(info: Inspection, *, tensors: bool) -> list[str]:
    same_size_note = f", same size as {info.known_as} (`notso verify` compares the content)" if info.known_as else ""
    file_size, tensor_size = terminal.gigabytes(info.size_bytes), terminal.gigabytes(info.tensor_bytes)
    lines = [
        f"{terminal.on_one_line(info.path)}: {file_size}, GGUF {info.gguf_version}{same_size_note}",
        f"{len(info.tensors)} tensors, {info.parameters:,} parameters, {info.bits_per_parameter:.2f} bits per parameter"
        f"; tensor data: {tensor_size}, starting at byte {info.data_offset:,}",
    ]
    if info.run is not None:
        lines += ["", "model", *_indent(_model(info.run))]
    lines += ["", "tensors by type"]
    rows = [
        [f.format, str(f.tensors), f"{f.parameters:,} values", terminal.gigabytes(f.size_bytes)] for f in info.formats
    ]
    lines += _indent(terminal.columns(rows, right=(1, 2, 3)))
    if info.tokenizer is not None:
        lines += ["", "tokenizer", *_indent(_tokenizer(info.tokenizer))]
    if info.run is not None:
        lines += ["", "memory", *_indent(_memory(info.run, info.tensor_bytes))]
    lines += ["", "metadata"]
    lines += _indent(terminal.columns([[e.key, e.type, _format_value(e)] for e in info.metadata]))
    if tensors:
        rows = [
            [t.name, t.format, " x ".join(map(str, t.shape)), terminal.gigabytes(t.size_bytes)] for t in info.tensors
        ]
        lines += ["", "tensors (outputs x inputs)", *_indent(terminal.columns(rows, right=(3,)))]
    return lines


def _model(run: RunInfo) -> list[str]:
    config = run.config
    tied = "tied to" if run.tied_embeddings else "separate from"
    return [
        f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"feed-forward {config['intermediate_size']}, {config['num_attention_heads']} query heads, "
        f"{config['num_key_value_heads']} key-value heads, head dimension {config['head_dim']}",
        f"vocabulary {config['vocab_size']:,}, output {tied} the embedding, "
        f"trained on contexts of {config['max_position_embeddings']:,} tokens",
        f"layers without RoPE (NoPE): {_join_numbers(run.nope_layers)}",
        f"layers with attn_v and ffn_down in Q6_K: {_join_numbers(run.q6_k_layers)}",
    ]


def _tokenizer(tokenizer: TokenizerInfo) -> list[str]:
    template = "none"
    if tokenizer.template_sha256 is not None:
        owner = tokenizer.template_known
        which = f"published template of {owner}" if owner else "not a published template"
        template = f"{tokenizer.template_bytes:,} bytes, {which}, SHA-256 {tokenizer.template_sha256[:16]}..."
    return [
        f"{_printable_name(tokenizer.kind)}, pre-tokenizer {_printable_name(tokenizer.pre)}, "
        f"{tokenizer.tokens:,} tokens, {tokenizer.merges:,} merges",
        f"{tokenizer.control_tokens} control tokens, {tokenizer.user_defined_tokens} user-defined tokens",
        f"chat template: {template}",
    ]


def _printable_name(text: str) -> str:
    from notso.qtensor import MAX_QUOTED_CHARACTERS, one_line

    return one_line(text, MAX_QUOTED_CHARACTERS) or "unnamed"


def _memory(run: RunInfo, tensor_bytes: int) -> list[str]:
    from notso.smollm3.engine.memory_plan import K8V8_UP_TO_TOKENS

    contexts = list(run.cache[0].bytes_at) if run.cache else []
    header = ["cache", "per token", *(f"{context:,}" for context in contexts), "fits here"]
    rows = [
        [
            plan.format,
            f"{plan.bytes_per_token:,} bytes",
            *(terminal.gigabytes(plan.bytes_at[context]) for context in contexts),
            f"{plan.fits_tokens:,} tokens",
        ]
        for plan in run.cache
    ]
    return [
        f"weights {terminal.gigabytes(tensor_bytes)}; generating a token reads {run.weight_bytes_per_token:,} bytes",
        f"{terminal.gigabytes(run.available_bytes)} available: {run.available_source}",
        *terminal.columns([header, *rows], right=range(1, len(header))),
        f"default KV cache type (--kv overrides it): k8v8 for contexts up to {K8V8_UP_TO_TOKENS:,} tokens, k8v4 for "
        "longer ones, and smaller types if memory is short. For float and 8-bit models: f16 for contexts up to "
        f"{K8V8_UP_TO_TOKENS:,} tokens, k8v8 for longer ones.",
    ]


def _format_value(entry: Entry) -> str:
    if entry.value is None:
        return f"({entry.length:,} {'items' if entry.type.startswith('array') else 'characters'})"
    if isinstance(entry.value, tuple):
        return ", ".join(str(item) for item in entry.value)
    return str(entry.value)


def _join_numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
