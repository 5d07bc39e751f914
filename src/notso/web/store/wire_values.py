"""What a store's methods take and return as JSON. The protocol's own types say how: a new method needs nothing here."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from notso.web.store.protocol import ChatStore
from notso.web.values import errors
from notso.web.values.errors import StorageError

PROPERTIES = ("damage", "read_only", "is_shared")
"""Known once the store is open."""


class MethodTypes:
    """Of one method of `ChatStore`. Raises StorageError for a name that is none."""

    def __init__(self, name: str) -> None:
        method = getattr(ChatStore, name, None)
        if name.startswith("_") or not inspect.iscoroutinefunction(method):
            raise StorageError(f"a store has no method {name}")
        self._signature = inspect.signature(method)
        hints = get_type_hints(method)
        self._lists = {each for each, hint in hints.items() if get_origin(hint) is Collection}
        self._types: dict[str, TypeAdapter[Any]] = {each: TypeAdapter(_known(hint)) for each, hint in hints.items()}

    def pack(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Arguments as JSON, by their names. Raises TypeError as the method would."""
        given = self._signature.bind(None, *arguments, **named).arguments
        listed = {name: list(each) if name in self._lists else each for name, each in given.items() if name != "self"}
        return {name: self._types[name].dump_python(each, mode="json") for name, each in listed.items()}

    def unpack(self, given: dict[str, Any]) -> dict[str, Any]:
        """And back, all by name."""
        return {name: self._types[name].validate_python(each) for name, each in given.items()}

    def pack_result(self, result: Any) -> Any:
        """A result as JSON."""
        return self._types["return"].dump_python(result, mode="json")

    def unpack_result(self, given: Any) -> Any:
        """And back. Raises StorageError for what is no such value."""
        try:
            return self._types["return"].validate_python(given)
        except ValidationError:
            raise StorageError("the store gave what it cannot have kept") from None


def _known(hint: Any) -> Any:
    """The hint, or, for a collection of any kind, which the library does not know, the list that it travels as."""
    return list[get_args(hint)] if get_origin(hint) is Collection else hint  # type: ignore[misc]


types_of = cache(MethodTypes)


def packed_error(error: StorageError) -> dict[str, str]:
    """A store's error as JSON."""
    return {"kind": type(error).__name__, "message": str(error)}


def unpacked_error(given: Any) -> StorageError:
    """And back, of the same class."""
    kind = getattr(errors, str(given.get("kind")), StorageError)
    is_ours = isinstance(kind, type) and issubclass(kind, StorageError)
    return (kind if is_ours else StorageError)(str(given.get("message"))[:300])
