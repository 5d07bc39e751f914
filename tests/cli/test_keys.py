"""`notso keys` creates, lists and revokes API keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Notso = Callable[..., Any]


def test_a_key_is_added_listed_and_revoked(notso: Notso, tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    limits = ("--tokens-per-day", "1000", "--requests-per-minute", "5", "--requests-per-day", "40", "--operator")
    added = notso("keys", "add", "ann", *limits, *where)
    assert added.code == 0 and added.out.startswith("notso-") and "not shown again" in added.err
    listed = json.loads(notso("keys", "list", "--json", *where).out)
    (key,) = listed
    assert (key["name"], key["tokens_per_day"], key["requests_per_minute"]) == ("ann", 1000, 5)
    assert key["requests_per_day"] == 40
    shown = notso("keys", *where).out
    assert "ann" in shown and " 40 " in shown and "operator" in shown and added.out.strip() not in shown
    again = notso("keys", "add", "ann", *where)
    assert again.code == 2 and "already" in again.err and len(again.err.splitlines()) == 1
    made = json.loads(notso("keys", "add", "bob", "--json", *where).out)
    assert made["key"].startswith("notso-") and made["name"] == "bob"
    assert notso("keys", "revoke", "ann", *where).code == 0
    assert "revoked" in notso("keys", *where).out
    assert json.loads(notso("keys", "revoke", "bob", "--json", *where).out)["revoked_ms"] > 0


def test_listing_and_revoking_keys_creates_no_files(notso: Notso, tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for arguments in ((), ("list", "--json")):
        refused = notso("keys", *arguments, "--data-dir", str(missing))
        assert (refused.code, refused.out) == (1, "") and len(refused.err.splitlines()) == 1
        assert str(missing) in refused.err and "does not exist" in refused.err
    assert notso("keys", "revoke", "ann", "--data-dir", str(missing)).code == 2
    listed = notso("keys", "--data-dir", str(empty))
    assert listed.code == 0 and "No keys" in listed.out
    assert json.loads(notso("keys", "list", "--json", "--data-dir", str(empty)).out) == []
    assert notso("keys", "revoke", "ann", "--data-dir", str(empty)).code == 2
    assert not missing.exists() and not list(empty.iterdir())


def test_user_is_removed_by_key_id_or_name(notso: Notso, tmp_path: Path) -> None:
    data = tmp_path / "data"
    where = ("--data-dir", str(data))
    missing = notso("keys", "remove", "ann", *where)
    assert missing.code == 1 and not data.exists()
    for name in ("ann", "bob"):
        notso("keys", "add", name, *where)
    notso("keys", "revoke", "ann", *where)
    notso("keys", "add", "ann", *where)
    several = notso("keys", "remove", "ann", *where)
    assert several.code == 2 and "2 keys are named ann: use an id: " in several.err
    ids = [each["id"] for each in json.loads(notso("keys", "--json", *where).out) if each["name"] == "ann"]
    assert len(ids) == 2 and all(each in several.err for each in ids)
    for each in ids:
        assert notso("keys", "remove", each, *where).out.endswith("documents and usage.\n")
    assert "ann" not in notso("keys", *where).out and "bob" in notso("keys", *where).out
    unknown = notso("keys", "remove", "ann", *where)
    assert unknown.code == 2 and "usage table, such as proxy:ann" in unknown.err
    misspelled = notso("keys", "remove", "proxy:ann", *where)
    assert misspelled.code == 2 and "no data is stored for proxy:ann" in misspelled.err
    (bob,) = (each["id"] for each in json.loads(notso("keys", "--json", *where).out))
    assert json.loads(notso("keys", "remove", f"key:{bob}", "--json", *where).out) == {"removed": f"key:{bob}"}


def test_invalid_key_arguments_are_refused(notso: Notso, tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    for arguments in (("add",), ("revoke",), ("revoke", "ann"), ("add", " "), ("forget", "ann"), ("list", "ann")):
        refused = notso("keys", *arguments, *where)
        assert refused.code == 2 and len(refused.err.splitlines()) == 1 and "Value error" not in refused.err
    assert "`notso keys list`" in notso("keys", "revoke", "ann", *where).err
