"""`notso verify`: whether a GGUF file is what it should be, and whether it is multiplied right."""

from __future__ import annotations

from notso.cli import options, terminal

EXAMPLES = """\
  notso verify SmolLM3-Q4_K_M.gguf
  notso verify model.gguf --json"""


def verify_file(
    file: options.File,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Check a file's hash, structure and every tensor.

    Each tensor's quantised product is compared with that of its dequantised reference; the worst error is shown.
    """
    from notso.smollm3.verification import verify_model

    with terminal.progress(as_json=as_json) as report:
        result = verify_model(file, progress=report)
    terminal.say_json(result)
