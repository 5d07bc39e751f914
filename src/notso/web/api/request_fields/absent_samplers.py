"""Samplers that there are not, as clients of other servers spell them: taken where they are off, refused where not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from notso.web.api.request_fields.fields import Fields, Notes, hint, inert
from notso.web.api.request_fields.hints import Hint


def _whole(given: Any) -> Any:
    """1.0 is 1, and true is not."""
    if isinstance(given, bool):
        raise ValueError("it should be a number")
    return int(given) if isinstance(given, float) and given.is_integer() else given


Off0 = Annotated[Literal[0], BeforeValidator(_whole)]
Off1 = Annotated[Literal[1], BeforeValidator(_whole)]
Number = int | float


class AbsentSamplerFields(Fields):
    """Each with the one value that is off."""

    tfs_z: Off1 | None = None
    top_a: Off0 | None = None
    dynatemp_range: Off0 | None = None
    dynatemp_exponent: Annotated[Number | None, Hint(done=(1,))] = None
    mirostat_tau: Annotated[Number | None, Hint()] = None
    mirostat_eta: Annotated[Number | None, Hint()] = None
    smoothing_factor: Off0 | None = None
    guidance_scale: Off1 | None = None
    length_penalty: Off1 | None = None
    no_repeat_ngram_size: Off0 | None = None


ABSENT_NOTES: Notes = {
    "tfs_z": inert("1: off", "use top_p, top_k or min_p"),
    "top_a": inert("0: off", "use min_p"),
    "dynatemp_range": inert("0: off", "use temperature"),
    "dynatemp_exponent": hint("the range is 0", "1"),
    "mirostat_tau": hint("mirostat is off"),
    "mirostat_eta": hint("mirostat is off"),
    "smoothing_factor": inert("0: off", "use temperature or min_p"),
    "guidance_scale": inert("1: off", "say it in the messages"),
    "length_penalty": inert("1: off", "use max_tokens"),
    "no_repeat_ngram_size": inert("0: off", "use repeat_penalty or dry_multiplier"),
}
