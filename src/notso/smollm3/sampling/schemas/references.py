"""Resolve the references of a JSON schema within its document: pointers, anchors and ids."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from notso.smollm3.errors import InvalidRequestError

_OLD_DRAFTS = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
_DATA = frozenset(("const", "enum", "default", "example", "examples"))


def is_old_draft(document: dict[str, Any]) -> bool:
    """Return whether the draft (7 or older) ignores keywords next to a reference."""
    said = document.get("$schema")
    return isinstance(said, str) and any(draft in said for draft in _OLD_DRAFTS)


class References:
    """The names in a document. Nothing is downloaded."""

    def __init__(self, document: dict[str, Any], param: str) -> None:
        self._param = param
        self._resources: dict[str, Any] = {"": document}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._id_keyword = "id" if "draft-04" in str(document.get("$schema", "")) else "$id"
        self._is_old = is_old_draft(document)
        self._index(document)

    def _index(self, document: dict[str, Any]) -> None:
        left: list[tuple[Any, str]] = [(document, "")]
        while left:
            each, base = left.pop()
            if isinstance(each, list):
                left += ((inner, base) for inner in each)
            if not isinstance(each, dict):
                continue
            name = each.get(self._id_keyword)
            if isinstance(name, str) and not (self._is_old and "$ref" in each):
                address, fragment = urldefrag(name)
                if address:
                    base = _joined(base, address)
                    self._resources.setdefault(base, each)
                if fragment:
                    self._anchors[base, fragment] = each
            for keyword in ("$anchor", "$dynamicAnchor"):
                anchor = each.get(keyword)
                if isinstance(anchor, str):
                    self._anchors[base, anchor] = each
            self._bases[id(each)] = base
            left += ((inner, base) for key, inner in each.items() if key not in _DATA or isinstance(inner, dict))

    def target(self, schema: dict[str, Any], where: str) -> Any:
        """Return the target of a `$ref`. Raise InvalidRequestError if it is not in the document."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise InvalidRequestError(f"{where}/$ref must be text", param=self._param)
        address, fragment = urldefrag(reference)
        base = self._bases.get(id(schema), "")
        if address:
            base = _joined(base, address)
        resource = self._resources.get(base)
        if resource is not None:
            if (base, fragment) in self._anchors:
                return self._anchors[base, fragment]
            found = _pointed(resource, unquote(fragment)) if fragment[:1] in ("", "/") else None
            if found is not None:
                return found
        raise InvalidRequestError(
            f"{where}/$ref cannot be resolved within the schema: {reference[:80]}", param=self._param
        )


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:
        return address


def _pointed(document: Any, pointer: str) -> Any:
    found = document
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found
