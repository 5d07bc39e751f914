"""Conversion of a Hugging Face `tokenizer.json` to GGUF entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from notso.smollm3.errors import ModelFileError
from notso.smollm3.text.tokenizer_pipeline import TokenizerPipeline
from notso.smollm3.text.vocabulary import CONTROL, NORMAL, USER_DEFINED
from notso.text_file import NotTextError, read_regular, read_text

MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"


def tokenizer_entries(path: Path) -> dict[str, Any]:
    """Return GGUF entries, with a neighboring chat template. Raises ModelFileError."""
    try:
        content = json.loads(read_regular(path, MAX_JSON_BYTES))
    except OSError as error:
        raise ModelFileError(f"the tokenizer file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError("the tokenizer file is not a byte-level BPE tokenizer.json") from error
    try:
        pipeline = TokenizerPipeline.from_json(content)
        by_id = {index: (text, NORMAL) for text, index in content["model"]["vocab"].items()}
        for added in content["added_tokens"]:
            by_id[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
        has_gaps = sorted(by_id) != list(range(len(by_id)))
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError("the tokenizer file is not a byte-level BPE tokenizer.json") from error
    if has_gaps:
        raise ModelFileError("the tokenizer file's ids have gaps")
    tokens = [by_id[i][0] for i in range(len(by_id))]
    entries: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [by_id[i][1] for i in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        **pipeline.entries(),
    }
    ids = {token: i for i, token in enumerate(tokens)}
    for key, text in (("bos", "<|begin_of_text|>"), ("eos", "<|im_end|>"), ("padding", "<|im_end|>")):
        if text in ids:
            entries[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    template = template_beside(path)
    return entries if template is None else entries | {"tokenizer.chat_template": template}


def template_beside(path: Path) -> str | None:
    """Return a neighboring chat template. Raises ModelFileError if unreadable."""
    try:
        return read_text(path.with_name(TEMPLATE_FILE), MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFileError(f"{TEMPLATE_FILE}: {error.strerror}") from error
    except NotTextError as error:
        raise ModelFileError(f"{TEMPLATE_FILE} {error}") from error
