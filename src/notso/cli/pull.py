"""`notso pull`: download a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from notso.cli import engines, options, terminal

EXAMPLES = """\
  notso pull
  notso pull Q8_0
  notso pull somebody/My-SmolLM3-GGUF:Q6_K"""


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="`Q4_K_M` (1.92 GB), `Q8_0` (3.28 GB), or REPOSITORY[:TYPE or :FILE] on the Hub."
        ),
    ] = "smollm3-3b:Q4_K_M",
    force: Annotated[bool, typer.Option("--force", help="Download again even if the file exists.")] = False,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not use the network; only verify existing files [env: HF_HUB_OFFLINE]."),
    ] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Download SmolLM3-3B (resumable, verified by SHA-256).

    NAME can also be a Hub repository with a GGUF file. The file is verified against the hash published on the Hub; use
    it with `notso run --model PATH`.

    Files are stored in the Hugging Face cache, and interrupted downloads are resumed. HF_HOME moves the cache, and
    HF_ENDPOINT selects a mirror. The path of the file is printed on stdout.
    """
    from notso.smollm3.hub import download, registry, repository

    file = repository.find_hub_file(name, offline=offline or download.is_offline())
    is_official = file in registry.official_files()
    pulled = engines.download(file, offline=offline, force=force, silent=as_json)
    if as_json:
        terminal.print_json({"name": file.name, **asdict(pulled), "path": str(pulled.path)})
        return
    resumed = f", resumed at {terminal.gigabytes(pulled.resumed_at_bytes)}" if pulled.resumed_at_bytes else ""
    how = f"downloaded{resumed}" if pulled.downloaded_bytes else "already downloaded"
    use = (
        "`notso serve` and `notso chat` now use it" if is_official else f"Use it with `notso run --model {pulled.path}`"
    )
    terminal.note(f"{file.name} {how}, SHA-256 verified. {use}.")
    terminal.print_line(str(pulled.path))
