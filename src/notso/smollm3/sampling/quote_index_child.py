"""Index long texts in a confined child process, so that other work is not delayed."""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from notso.smollm3.sampling.quote_index import CLOSE, PROSE, Places, QuoteIndex, QuoteLimits
from notso.system.confinement import ConfinedProcess, ConfinedWorkError, Limits, serve_confined

PROGRAM = "from notso.smollm3.sampling.quote_index_child import main; main()"
MIB = 1 << 20
LIMITS = Limits(cpu_s=120, memory_bytes=4096 * MIB, wall_s=600, answer_bytes=512 * MIB)


def compute_places(text: str, limits: QuoteLimits, barred: Sequence[bytes], *, escaped: bool) -> Places:
    """Return the memory-mapped places of a text. Raises ConfinedWorkError."""
    request = encode_request(text, limits, barred, escaped=escaped)
    child = ConfinedProcess(["-c", PROGRAM], request, LIMITS)
    try:
        with tempfile.TemporaryFile() as file:
            for piece in child.pieces():
                file.write(piece)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfinedWorkError(f"the index cannot be stored: {error.strerror}") from None
    finally:
        child.kill()
    return deserialize_places(mapped, len(request))


def main() -> None:
    """Read a request from stdin and write the places to stdout."""
    # The first call imports and loads everything that is needed, because a confined process cannot do so.
    work(encode_request("What is used is loaded before everything is forbidden. " * 40, PROSE, [CLOSE], escaped=True))
    serve_confined(work, LIMITS)


def encode_request(text: str, limits: QuoteLimits, barred: Sequence[bytes], *, escaped: bool) -> bytes:
    """Build a request for the child."""
    options = {"limits": astuple(limits), "barred": [each.hex() for each in barred], "escaped": escaped}
    head = json.dumps(options).encode()
    return b"".join((len(head).to_bytes(4, "big"), head, text.encode("utf-8", "surrogatepass")))


def work(request: bytes) -> bytes:
    """Return the serialized places of the text in a request."""
    size = 4 + int.from_bytes(request[:4], "big")
    options = json.loads(request[4:size])
    barred = [bytes.fromhex(each) for each in options["barred"]]
    text = request[size:].decode("utf-8", "surrogatepass")
    limits = QuoteLimits(*options["limits"])
    return serialize_places(QuoteIndex(text, limits, barred, escaped=options["escaped"]).places)


def serialize_places(places: Places) -> bytes:
    """Serialize places for `deserialize_places`."""
    counts = np.array([len(places.starts), len(places.ends)], np.int64)
    return b"".join(each.tobytes() for each in (counts, places.starts, places.ends, places.shortest, places.longest))


def deserialize_places(data: mmap.mmap | memoryview | bytes, size: int) -> Places:
    """Deserialize the places of a text of up to `size` characters. Raises ConfinedWorkError if they are invalid."""
    if len(data) < 16:
        raise ConfinedWorkError("the index is too short")
    starts, ends = (int(each) for each in np.frombuffer(data, np.int64, 2))
    if min(starts, ends) < 0 or max(starts, ends) > 6 * size or len(data) != 16 + 8 * starts + 4 * ends:
        raise ConfinedWorkError("the index has an invalid size")
    at = 16 + 4 * (starts + ends)
    return Places(
        np.frombuffer(data, np.int32, starts, 16),
        np.frombuffer(data, np.uint16, starts, at),
        np.frombuffer(data, np.uint16, starts, at + 2 * starts),
        np.frombuffer(data, np.int32, ends, 16 + 4 * starts),
    )
