"""Look up users by name, for example to add them to a project, and remove users together with all their stored data.

An owner is the id of a user: `METHOD:NAME` with the sign-in method, or `key:ID` for an API key.
"""

from __future__ import annotations

from notso.web.sign_in.issued_keys import owner_of_key
from notso.web.store.access import AccessStore, AuditEntry
from notso.web.store.protocol import ChatStore
from notso.web.values.durations import current_ms
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings
from notso.web.values.sign_in import is_user_name

KEY_OWNER = owner_of_key("")


async def owner_named(settings: Settings, store: AccessStore | None, name: str) -> str | None:
    """Return the owner of the active key `name`, or else the id of a user that signs in as `name`, or None.

    `method:name` selects a sign-in method; a plain name uses the first configured method.
    """
    keys = await store.keys() if store is not None else []
    key = next((each for each in keys if each.name == name and not each.revoked_ms), None)
    if key is not None:
        return owner_of_key(key.id)
    chosen = settings.sign_in
    methods = (("proxy", chosen.proxy), ("oidc", chosen.oidc), (settings.sign_in_plugin, settings.sign_in_plugin))
    available = [method for method, configured in methods if configured is not None]
    given, _, rest = name.partition(":")
    method, name = (given, rest) if given in available else (next(iter(available), None), name)
    if method is None or not is_user_name(name):
        return None
    return chosen.oidc.owner(name) if method == "oidc" and chosen.oidc is not None else f"{method}:{name}"


async def user_named(access: AccessStore | None, name: str) -> str:
    """Return the owner of the key (active or revoked) with this name or id, or the owner given as `method:name`.

    Raises SettingsError if `name` matches several keys, or matches none and does not have the form `method:name`.
    """
    keys = await access.keys() if access is not None else []
    found = [owner_of_key(each.id) for each in keys if name in (each.name, each.id, owner_of_key(each.id))]
    if len(found) > 1:
        ids = ", ".join(each.removeprefix(KEY_OWNER) for each in found)
        raise SettingsError(f"{len(found)} keys are named {name}: use an id: {ids}", setting="name")
    if found:
        return found[0]
    method, colon, rest = name.partition(":")
    if not colon or not method or not rest or method == KEY_OWNER.rstrip(":"):
        raise SettingsError(
            f"there is no key named {name}; for a user without a key, use the name in the usage table, such as "
            f"proxy:{name}",
            setting="name",
        )
    return name


async def revoke_key_of(access: AccessStore, owner: str) -> None:
    """Revoke the owner's key, if any, so that the user cannot store new data. Raises StorageError."""
    key = await access.key(owner.removeprefix(KEY_OWNER)) if owner.startswith(KEY_OWNER) else None
    if key is not None and not key.revoked_ms:  # the name of a revoked key may belong to a new key
        await access.revoke_key(key.name, current_ms())


async def remove_user(store: ChatStore, access: AccessStore | None, owner: str, removed_by: str) -> None:
    """Permanently delete a user's key, usage and stored data. `removed_by` appears in the audit log.

    Raises StorageError, or SettingsError if nothing is stored. Can be repeated after a failure.
    """
    if access is not None:
        await revoke_key_of(access, owner)
    found = await store.remove_owner(owner)
    # Delete the key last, because its name and id are needed to repeat the removal after a failure.
    found |= access is not None and await access.remove_owner(owner)
    if not found:
        raise SettingsError(f"no data is stored for {owner}", setting="name")
    if access is not None:
        # The audit entry does not name the removed user.
        removed = f"the key {owner.removeprefix(KEY_OWNER)}" if owner.startswith(KEY_OWNER) else "a signed-in user"
        await access.add_audit(
            AuditEntry(current_ms(), removed_by, f"removed {removed} with all data", by_operator=True)
        )
