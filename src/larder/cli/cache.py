"""`larder cache`: the sessions that are kept, looked at and looked after."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.failing import SCHEMA, print_document
from larder.cli.groups import HelpfulGroup
from larder.cli.kept import KeyFile, StoreUrl, opened
from larder.cli.options import Output, command
from larder.cli.showing import results, size, table
from larder.core.errors import Damaged, InputError, UsageError
from larder.core.settings import LOCAL_PRINCIPAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from larder.store.sessions.records import Record
    from larder.store.store import Store

app = typer.Typer(
    cls=HelpfulGroup, help="List, show, verify, export, import, remove, seal sessions."
)
Name = Annotated[str, typer.Argument(metavar="SESSION", help="Its name.")]


@dataclass(frozen=True)
class Kept(Output):
    """Where sessions are kept, and whose are meant."""

    store: StoreUrl = None
    key_file: KeyFile = None
    owner: Annotated[
        str, typer.Option(metavar="PRINCIPAL", help="Whose sessions: an API user's name.")
    ] = LOCAL_PRINCIPAL


@app.command("list")
@command
def list_all(options: Kept) -> None:
    """List the sessions of an owner, the one that was used last first."""
    with _opened(options) as store:
        records = store.sessions.heads(options.owner)
    if options.json:
        print_document({"schema": SCHEMA, "sessions": [_told(each) for each in records]})
        return
    if not records:
        results().print("No sessions are kept.")
        return
    shown = table("session", "policy", "codec", "saved", "tokens", "bytes", "states", texts=4)
    for each in records:
        kept = size(sum(ref.bytes for ref in each.refs))
        told = each.policy or "tokens only", each.codec, _when(each)
        shown.add_row(each.name, *told, str(each.num_tokens), kept, str(each.epoch))
    results().print(shown)


@app.command("show")
@command
def show(name: Name, options: Kept) -> None:
    """Show what is kept of a session, and what its cache depends on."""
    with _opened(options) as store:
        record = _found(store, options, name)
        states = store.parts.manifest.epochs(record.tenant, record.session)
    told = _told(record) | {"states": states}
    if options.json:
        print_document({"schema": SCHEMA, **told})
        return
    shown = table("", "", texts=2)
    for key, value in told.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for inner, each in rows:
            shown.add_row(f"{key} {inner}".strip(), str(each))
    results().print(shown)


@app.command("verify")
@command
def verify(
    options: Kept,
    name: Annotated[
        str | None, typer.Argument(metavar="SESSION", help="Its name.  Default: all.")
    ] = None,
) -> None:
    """Read every byte of sessions and compare it with its digests; exit code 1 if any differs."""
    with _opened(options) as store:
        meant = (
            store.sessions.heads(options.owner) if name is None else [_found(store, options, name)]
        )
        checked = store.upkeep.verify(meant)
        freed = store.upkeep.sweep() if name is None else 0
    told = [{"session": c.record.name, "problems": list(c.problems)} for c in checked]
    damaged = [each for each in checked if each.problems]
    if options.json and not damaged:
        print_document({"schema": SCHEMA, "sessions": told, "freed_bytes": freed})
    elif not damaged:
        results().print(f"{len(checked)} sessions are whole; {size(freed)} of orphans swept.")
    if damaged:
        said = " ".join(f"{each.record.name}: {' '.join(each.problems)}" for each in damaged)
        raise Damaged(
            f"{len(damaged)} of {len(checked)} sessions are damaged. Those whose tokens are whole "
            f"are read again when they are asked for. {said}"
        )


@app.command("export")
@command
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be written.")],
    options: Kept,
) -> None:
    """Write a session, cache and all, to one file."""
    if file.exists():
        raise InputError(f"{file} exists: take another name, or remove it first.")
    with _opened(options) as store:
        data = store.exchange.export(_found(store, options, name))
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}).") from error
    _say(options, {"session": name, "file": str(file), "bytes": len(data)})


@app.command("import")
@command
def take_in(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="That 'export' has written.")],
    name: Name,
    options: Kept,
) -> None:
    """Make a session of an exported file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from error
    with _opened(options) as store:
        record = store.exchange.take_in(data, options.owner, name)
    _say(options, {"session": name, "tokens": record.num_tokens, "bytes": len(data)})


@app.command("remove")
@command
def remove(name: Name, options: Kept) -> None:
    """Forget a session; what no other session needs is deleted."""
    with _opened(options) as store:
        freed = store.sessions.remove(options.owner, name)
    _say(options, {"session": name, "freed_bytes": freed})


@app.command("seal")
@command
def seal(options: Output, key_file: KeyFile = None) -> None:
    """Put under the key what was written without one: the server's archive, and chats.

    Who has written it, and in which order, is believed as it stands. The server must not run.
    """
    from larder.core.settings import home
    from larder.server.web.archive_adoption import adopt as adopt_archive
    from larder.session.logbook import adopt as adopt_chats
    from larder.store.encryption import encryption_for, read_key

    key = read_key(key_file)
    if key is None:
        raise UsageError("There is no key to seal with: give --key-file FILE.")
    archive = home() / "server" / "archive.sqlite"
    documents = adopt_archive(archive, encryption_for(key, "archive"))
    _say(options, {"documents": documents, "chats": adopt_chats(encryption_for(key, "chats"))})


@contextmanager
def _opened(options: Kept) -> Iterator[Store]:
    store = opened(options.store, options.key_file)
    try:
        yield store
    finally:
        store.close()


def _found(store: Store, options: Kept, name: str) -> Record:
    named = {record.name: record for record in store.sessions.heads(options.owner)}
    if name not in named:
        raise InputError(f"There is no session {name!r}: 'larder cache list' names all.")
    return named[name]


def _told(record: Record) -> dict[str, Any]:
    return {
        "session": record.name,
        "epoch": record.epoch,
        "saved": _when(record),
        "tokens": record.num_tokens,
        "bytes": sum(ref.bytes for ref in record.refs),
        "cache_bytes": record.cache_bytes,
        "policy": record.policy,
        "codec": record.codec,
        "lossless": record.lossless,
        "blobs": len(record.refs),
        "identity": dict(record.identity),
    }


def _when(record: Record) -> str:
    return datetime.fromtimestamp(record.made, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _say(options: Output, told: dict[str, Any]) -> None:
    if options.json:
        print_document({"schema": SCHEMA, **told})
        return
    results().print(", ".join(f"{key} {value}" for key, value in told.items()), soft_wrap=True)
