"""`notso documents`: manage the documents of a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from notso.cli import options, terminal
from notso.text_file import read_regular

if TYPE_CHECKING:
    from notso.web.store.documents import Library, StoredDocument
    from notso.web.store.protocol import ChatStore

EXAMPLES = """\
  notso documents add report.pdf notes/
  notso documents list
  notso documents search license costs
  notso documents add --library Taxes 2025/
  notso documents read report.pdf --page 3"""

MOST_HITS = 10


def documents(
    action: Annotated[
        Literal["list", "add", "read", "search", "rm"],
        typer.Argument(metavar="add|list|read|search|rm", help="Action."),
    ] = "list",
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ITEM",
            help="Files and folders to add; names or ids of documents to read or remove; words to search for.",
        ),
    ] = None,
    page: Annotated[int | None, typer.Option("--page", metavar="N", min=1, help="Read only this page.")] = None,
    library: Annotated[
        str,
        typer.Option(
            "--library",
            metavar="NAME",
            help="Library to use; `add` creates it if necessary. All libraries except Documents are projects.",
        ),
    ] = "Documents",
    unconfined: Annotated[
        bool,
        typer.Option(
            "--unconfined-documents",
            help="Parse PDF files and spreadsheets even if the system has no sandbox (Landlock and seccomp).",
        ),
    ] = False,
    data_dir: options.DataDir = None,
    database_url: options.DatabaseUrl = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Add, list, read, search or remove documents of a library.

    To ask about documents in a chat, open Documents in the browser. Stop the server before running this command, unless
    documents are stored in PostgreSQL (DATABASE_URL). If an added document cannot be read, it is kept in the library,
    and the command exits with an error.
    """
    if (action == "list") != (not items):
        raise typer.BadParameter(
            f"{action} {'takes no items' if items else 'needs at least one item'}", param_hint="ITEM"
        )
    from notso.web.edge.access import LOCAL_OWNER
    from notso.web.store.documents import DEFAULT_LIBRARY
    from notso.web.store.opening import run_with_store
    from notso.web.values.errors import WebError
    from notso.web.values.settings import Settings
    from notso.web.values.visible_text import sanitize_line

    settings = Settings(data_dir=data_dir, database_url=database_url or None)
    if not 1 <= len(library) <= 100 or library != sanitize_line(library, 100):
        raise typer.BadParameter("a name must have 1 to 100 visible characters", param_hint="--library")
    files = [path for item in items or [] for path in _list_files(Path(item))] if action == "add" else []

    async def run_action(store: ChatStore) -> None:
        if action == "add":
            return await _add(store, library, unconfined, files, as_json)
        found = await store.documents.libraries(LOCAL_OWNER)
        chosen = next((each for each in found if each.owner == LOCAL_OWNER and each.name == library), None)
        if chosen is None and library != DEFAULT_LIBRARY:
            names = ", ".join(each.name for each in found if each.owner == LOCAL_OWNER)
            raise WebError(f"there is no library called {library}; existing libraries: {names or 'none'}")
        if action == "search":
            await _search(store, chosen, " ".join(items or []), as_json)
        else:
            stored = await store.documents.documents(LOCAL_OWNER, chosen.id) if chosen is not None else []
            if action == "list":
                _print_documents(stored, as_json)
            for document in [_find_document(stored, item) for item in items or []]:
                if action == "rm":
                    await store.documents.delete(LOCAL_OWNER, document.id)
                else:
                    await _read(store, document, page, as_json)

    run_with_store(settings.directory, settings.database_url, run_action)


async def _search(store: ChatStore, library: Library | None, query: str, as_json: bool) -> None:
    from notso.web.edge.access import LOCAL_OWNER

    library_id = library.id if library is not None else ""
    hits = await store.documents.search(LOCAL_OWNER, query, MOST_HITS, library_id=library_id)
    if as_json:
        terminal.print_json([asdict(each) for each in hits])
        return
    for each in hits:
        shown = f", page {each.page}" if each.document.pages > 1 else ""
        terminal.print_line(f"{each.document.name}{shown}:\n{each.text}\n")
    if not hits:
        searched = await store.documents.documents(LOCAL_OWNER, library_id)
        terminal.print_line(f"Nothing in {terminal.counted(len(searched), 'document')} mentions these words.")


async def _add(store: ChatStore, name: str, unconfined: bool, files: Sequence[tuple[Path, str]], as_json: bool) -> None:
    from notso.documents.values import MAX_FILE_BYTES
    from notso.web.chat.library import LibraryWorker
    from notso.web.edge.access import LOCAL_OWNER
    from notso.web.values.errors import WebError

    library = await store.documents.library(LOCAL_OWNER, name)
    work = LibraryWorker(store, unconfined=unconfined)
    ids = []
    for path, shown in files:
        content = read_regular(path, MAX_FILE_BYTES)
        ids.append((await store.documents.add(LOCAL_OWNER, library.id, shown, content)).id)
        await work.parse_queued()
    added = await store.documents.some(LOCAL_OWNER, ids)
    _print_documents(added, as_json)
    if failed := [each for each in added if each.state == "failed"]:
        raise WebError(f"{len(failed)} of {len(added)} documents cannot be read but are kept in the library")


def _list_files(path: Path) -> list[tuple[Path, str]]:
    from notso.documents.values import MAX_FILE_BYTES
    from notso.web.chat.library import display_name, find_document_files

    def on_error(error: OSError) -> None:
        if Path(error.filename) == path:
            raise error
        terminal.warn(terminal.on_one_line(f"notso: {error.filename} is skipped: {error.strerror}"))

    if not path.is_dir():
        read_regular(path, MAX_FILE_BYTES)  # raises OSError before any file is added
    parent = path.absolute().parent
    return [
        (each, display_name(str(each.absolute().relative_to(parent))))
        for each in (find_document_files(path, on_error) if path.is_dir() else [path])
    ]


async def _read(store: ChatStore, document: StoredDocument, page: int | None, as_json: bool) -> None:
    from notso.documents.values import unreadable
    from notso.web.edge.access import LOCAL_OWNER
    from notso.web.values.errors import WebError

    text = await store.documents.text(LOCAL_OWNER, document.id)
    if text is None:
        raise WebError(f"{document.name} cannot be read: it {unreadable(document.reason or 'has not been parsed yet')}")
    if page is not None and page > len(text.pages):
        raise WebError(f"{document.name} has {terminal.counted(len(text.pages), 'page')}")
    ends = (*text.pages[1:], len(text.text))
    shown = text.text if page is None else text.text[text.pages[page - 1] : ends[page - 1]].strip()
    if as_json:
        terminal.print_json(_document_as_dict(document) | {"text": shown})
    else:
        terminal.print_line(shown)


def _find_document(stored: Sequence[StoredDocument], item: str) -> StoredDocument:
    from notso.web.values.errors import WebError

    found = [each for each in stored if item in (each.id, each.name)]
    if len(found) != 1:
        problem = "there is no document" if not found else f"{len(found)} documents are"
        raise WebError(f"{problem} called {item}; `notso documents list` shows names and ids")
    return found[0]


def _document_as_dict(document: StoredDocument) -> dict[str, Any]:
    from notso.documents.values import unreadable

    return asdict(document) | {"reason": str(unreadable(document.reason))}


def _print_documents(found: Sequence[StoredDocument], as_json: bool) -> None:
    from notso.documents.values import unreadable

    if as_json:
        terminal.print_json([_document_as_dict(each) for each in found])
        return
    rows = [["name", "state", "pages", "characters", "id"]]
    for each in found:
        state = f"{each.state}: it {unreadable(each.reason)}" if each.state == "failed" else each.state
        rows.append([each.name, state, f"{each.pages:,}", f"{each.characters:,}", each.id])
    terminal.print_lines(
        terminal.columns(rows) if found else ["No documents; add some with `notso documents add FILE`."]
    )
