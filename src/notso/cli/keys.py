"""`notso keys`: manage API keys, and remove users."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from notso.cli import options, terminal

if TYPE_CHECKING:
    from notso.web.store.access import ApiKey
    from notso.web.store.protocol import ChatStore
    from notso.web.values.settings import Settings

EXAMPLES = """\
  notso keys add ann --tokens-per-day 100000
  notso keys revoke ann
  notso keys remove ann"""


def keys(
    action: Annotated[
        Literal["list", "add", "revoke", "remove"], typer.Argument(metavar="list|add|revoke|remove", help="Action.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the key, or user to remove.")] = None,
    requests_per_minute: Annotated[
        int,
        typer.Option(
            "--requests-per-minute", metavar="N", min=0, max=1_000_000, help="Request rate limit (0: unlimited)."
        ),
    ] = 0,
    requests_per_day: Annotated[
        int,
        typer.Option("--requests-per-day", metavar="N", min=0, max=10**9, help="Daily request quota (0: unlimited)."),
    ] = 0,
    tokens_per_day: Annotated[
        int, typer.Option("--tokens-per-day", metavar="N", min=0, max=10**12, help="Daily token quota (0: unlimited).")
    ] = 0,
    operator: Annotated[bool, typer.Option("--operator", help="Grant access to the administration page.")] = False,
    data_dir: options.DataDir = None,
    database_url: options.DatabaseUrl = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """List, add or revoke keys, or remove users.

    A key is shown only once, when it is created; only its hash is stored. After adding the first key to a data
    directory, restart the server. Keys in a database (DATABASE_URL) apply to all servers that use the database.

    `remove` permanently deletes a key, or a signed-in user such as proxy:ann, with all chats, documents and usage. If
    these are stored in a data directory, stop the server first, or use the server's administration page.
    """
    if action != "list" and name is None:
        raise typer.BadParameter(f"{action} needs a name", param_hint="NAME")
    if action == "list" and name is not None:
        raise typer.BadParameter("list takes no name", param_hint="NAME")
    from notso.web.sign_in.issued_keys import KeyManager
    from notso.web.store.opening import create_access_store
    from notso.web.store.sqlite.access import SQLiteAccessStore
    from notso.web.values.errors import SettingsError
    from notso.web.values.settings import Settings

    settings = Settings(data_dir=data_dir, database_url=database_url or None)
    if settings.database_url is None and action != "add" and not SQLiteAccessStore.exists(settings.directory):
        # `add` creates the database file if necessary; the other actions do not.
        if action == "revoke":
            raise SettingsError(f"there is no active key named {name}", setting="name")
        if not settings.directory.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "the data directory does not exist; nothing was created", str(settings.directory)
            )
        if action == "list":
            _print_keys([], as_json)
            return
    if action == "remove" and name is not None:
        _remove(settings, name)
        if as_json:
            terminal.print_json({"removed": name})
        else:
            terminal.print_line(f"{name} removed, with all chats, documents and usage.")
        return
    key_manager = KeyManager(lambda: create_access_store(settings.directory, settings.database_url))
    if name is None:
        _print_keys(key_manager.all(), as_json)
    elif action == "add":
        secret, key = key_manager.add(
            name,
            requests_per_minute=requests_per_minute,
            requests_per_day=requests_per_day,
            tokens_per_day=tokens_per_day,
            is_operator=operator,
        )
        if as_json:
            terminal.print_json({"key": secret, **asdict(key)})
        else:
            terminal.print_line(secret)
            terminal.note("Store this key: it is not shown again.")
    else:
        revoked = key_manager.revoke(name)
        if as_json:
            terminal.print_json(asdict(revoked))
        else:
            terminal.print_line(f"Key {revoked.name} revoked.")


def _remove(settings: Settings, name: str) -> None:
    from notso.web.sign_in.issued_keys import COMMAND_LINE
    from notso.web.sign_in.users import remove_user, user_named
    from notso.web.store.opening import create_access_store, run_with_store
    from notso.web.store.sqlite.access import SQLiteAccessStore

    async def remove_keys_and_user(store: ChatStore) -> None:
        async with contextlib.AsyncExitStack() as closing:
            access = None
            if settings.database_url is not None or SQLiteAccessStore.exists(settings.directory):
                access = create_access_store(settings.directory, settings.database_url)
                closing.push_async_callback(access.close)
                await access.open()
            await remove_user(store, access, await user_named(access, name), COMMAND_LINE)

    run_with_store(settings.directory, settings.database_url, remove_keys_and_user)


def _print_keys(found: list[ApiKey], as_json: bool) -> None:
    if as_json:
        terminal.print_json([asdict(key) for key in found])
        return
    rows = [["name", "id", "requests/min", "requests/day", "tokens/day", ""]]
    for key in found:
        state = "revoked" if key.revoked_ms else "operator" if key.is_operator else ""
        limits = (key.requests_per_minute, key.requests_per_day, key.tokens_per_day)
        rows.append([key.name, key.id, *(str(limit or "-") for limit in limits), state])
    terminal.print_lines(terminal.columns(rows) if found else ["No keys; create one with `notso keys add NAME`."])
