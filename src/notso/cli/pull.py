"""`notso pull`: fetch a model file."""

from __future__ import annotations

from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso pull
  notso pull Q8_0
  notso pull somebody/My-SmolLM3-GGUF:Q6_K"""


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="`Q4_K_M` (1.92 GB), `Q8_0` (3.28 GB), or REPOSITORY[:TYPE] of the Hub."),
    ] = "smollm3-3b:Q4_K_M",
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is here.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network: only check what is here. [env var: HF_HUB_OFFLINE]")
    ] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Download SmolLM3-3B, with resume, and check its hash.

    Or any repository's GGUF file, checked by the hash that the Hub has for it: `notso run --model PATH` asks it.

    It goes to the Hugging Face cache, and an interrupted download goes on where it stopped. HF_HOME moves the cache,
    HF_ENDPOINT names a mirror. The file's path is printed on stdout.
    """
    from notso.smollm3.hub import download, registry, repository

    file = repository.file_named(name, offline=offline or download.is_offline())
    is_official = file in registry.official_files()
    if not as_json and registry.find_local(file) is None and not offline:
        plan = download.plan_download(file)
        free = terminal.gigabytes(plan.free_bytes)
        terminal.note(f"{file.filename}, {terminal.gigabytes(file.size_bytes)}, to {plan.folder} ({free} free)")
    try:
        with terminal.progress(in_bytes=True, as_json=as_json) as report:
            pulled = download.pull(file, offline=offline, force=force, progress=report)
    except KeyboardInterrupt:
        terminal.note("Stopped; the same command goes on from here.")
        raise
    if as_json:
        terminal.say_json(
            {
                "name": file.name,
                "path": str(pulled.path),
                "sha256": pulled.sha256,
                "size_bytes": pulled.size_bytes,
                "downloaded_bytes": pulled.downloaded_bytes,
                "resumed_at_bytes": pulled.resumed_at_bytes,
            }
        )
        return
    resumed = f", resumed at {terminal.gigabytes(pulled.resumed_at_bytes)}" if pulled.resumed_at_bytes else ""
    how = f"fetched{resumed}" if pulled.downloaded_bytes else "was here already"
    use = "`notso serve` and `notso chat` use it now" if is_official else f"`notso run --model {pulled.path}` asks it"
    terminal.note(f"{file.name} {how}; its SHA-256 is the published one. {use}.")
    terminal.say(str(pulled.path))
