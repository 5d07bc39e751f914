"""Reading forms: urlencoded only, strict about bytes, never on the event loop."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qsl

from fastapi import Request

from notso.web.problems import Problem
from notso.web.wording import words

MAX_FIELDS = 32
FORM_TYPE = "application/x-www-form-urlencoded"

_UNFIT = re.compile("[\x00\ud800-\udfff]")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Problem: 415 for another content type, 400 for what is not text."""
    body = await request.body()
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
        raise Problem(415, words["error_form"])
    return await asyncio.to_thread(_parse, body)


def _parse(body: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise Problem(400, words["error_form"]) from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Problem(400, words["error_form"])
    for value in (*fields.keys(), *fields.values()):
        if _UNFIT.search(value):
            raise Problem(400, words["error_text"])
    return {name: value.replace("\r\n", "\n") for name, value in fields.items()}
