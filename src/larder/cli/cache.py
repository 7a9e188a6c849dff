"""`larder cache`: the sessions that are kept, looked at and looked after."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import format_bytes, make_table, results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import HelpGroup, OutputOptions, command
from larder.cli.store_options import KeyFile, StoreUrl, open_store
from larder.core.errors import Damaged, InputError, UsageError
from larder.core.settings import LOCAL_PRINCIPAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from larder.store.sessions.records import Record
    from larder.store.store import Store

app = typer.Typer(cls=HelpGroup, help="List, show, verify, export, import, remove, seal sessions.")
Name = Annotated[str, typer.Argument(metavar="SESSION", help="Its name.")]


@dataclass(frozen=True)
class SessionOptions(OutputOptions):
    """Where sessions are kept, and whose are meant."""

    store: StoreUrl = None
    key_file: KeyFile = None
    owner: Annotated[
        str, typer.Option(metavar="PRINCIPAL", help="Whose sessions: an API user's name.")
    ] = LOCAL_PRINCIPAL


@app.command("list")
@command
def list_all(options: SessionOptions) -> None:
    """List the sessions of an owner, the one that was used last first."""
    with _open_store(options) as store:
        records = store.sessions.heads(options.owner)
    if options.json:
        print_document({"schema": SCHEMA, "sessions": [_record_document(each) for each in records]})
        return
    if not records:
        results_console().print("No sessions are kept.")
        return
    shown = make_table("session", "policy", "codec", "saved", "tokens", "bytes", "states", texts=4)
    for each in records:
        kept = format_bytes(sum(ref.bytes for ref in each.refs))
        told = each.policy or "tokens only", each.codec, _saved_at(each)
        shown.add_row(each.name, *told, str(each.num_tokens), kept, str(each.epoch))
    results_console().print(shown)


@app.command("show")
@command
def show(name: Name, options: SessionOptions) -> None:
    """Show what is kept of a session, and what its cache depends on."""
    with _open_store(options) as store:
        record = _session_record(store, options, name)
        states = store.parts.manifest.epochs(record.tenant, record.session)
    told = _record_document(record) | {"states": states}
    if options.json:
        print_document({"schema": SCHEMA, **told})
        return
    shown = make_table("", "", texts=2)
    for key, value in told.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for inner, each in rows:
            shown.add_row(f"{key} {inner}".strip(), str(each))
    results_console().print(shown)


@app.command("verify")
@command
def verify(
    options: SessionOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="SESSION", help="Its name.  Default: all.")
    ] = None,
) -> None:
    """Read every byte of sessions and compare it with its digests; exit code 1 if any differs."""
    with _open_store(options) as store:
        meant = (
            store.sessions.heads(options.owner)
            if name is None
            else [_session_record(store, options, name)]
        )
        checked = store.maintenance.verify(meant)
        freed = store.maintenance.sweep() if name is None else 0
    told = [{"session": c.record.name, "problems": list(c.problems)} for c in checked]
    damaged = [each for each in checked if each.problems]
    if options.json and not damaged:
        print_document({"schema": SCHEMA, "sessions": told, "freed_bytes": freed})
    elif not damaged:
        results_console().print(
            f"{len(checked)} sessions are whole; {format_bytes(freed)} of orphans swept."
        )
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
    options: SessionOptions,
) -> None:
    """Write a session, cache and all, to one file."""
    if file.exists():
        raise InputError(f"{file} exists: take another name, or remove it first.")
    with _open_store(options) as store:
        data = store.exchange.export(_session_record(store, options, name))
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}).") from error
    _print_result(options, {"session": name, "file": str(file), "bytes": len(data)})


@app.command("import")
@command
def import_session(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="That 'export' has written.")],
    name: Name,
    options: SessionOptions,
) -> None:
    """Make a session of an exported file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from error
    with _open_store(options) as store:
        record = store.exchange.take_in(data, options.owner, name)
    _print_result(options, {"session": name, "tokens": record.num_tokens, "bytes": len(data)})


@app.command("remove")
@command
def remove(name: Name, options: SessionOptions) -> None:
    """Forget a session; what no other session needs is deleted."""
    with _open_store(options) as store:
        freed = store.sessions.remove(options.owner, name)
    _print_result(options, {"session": name, "freed_bytes": freed})


@app.command("seal")
@command
def seal(options: OutputOptions, key_file: KeyFile = None) -> None:
    """Put under the key what was written without one: the server's archive, and chats.

    Who has written it, and in which order, is believed as it stands. The server must not run.
    """
    from larder.core.settings import home
    from larder.server.http.archive import seal_archive as adopt_archive
    from larder.session.transcript.session_file import seal_session_files as adopt_chats
    from larder.store.encryption import encryption_for, read_key

    key = read_key(key_file)
    if key is None:
        raise UsageError("There is no key to seal with: give --key-file FILE.")
    archive = home() / "server" / "archive.sqlite"
    documents = adopt_archive(archive, encryption_for(key, "archive"))
    _print_result(
        options, {"documents": documents, "chats": adopt_chats(encryption_for(key, "chats"))}
    )


@contextmanager
def _open_store(options: SessionOptions) -> Iterator[Store]:
    store = open_store(options.store, options.key_file)
    try:
        yield store
    finally:
        store.close()


def _session_record(store: Store, options: SessionOptions, name: str) -> Record:
    named = {record.name: record for record in store.sessions.heads(options.owner)}
    if name not in named:
        raise InputError(f"There is no session {name!r}: 'larder cache list' names all.")
    return named[name]


def _record_document(record: Record) -> dict[str, Any]:
    return {
        "session": record.name,
        "epoch": record.epoch,
        "saved": _saved_at(record),
        "tokens": record.num_tokens,
        "bytes": sum(ref.bytes for ref in record.refs),
        "cache_bytes": record.cache_bytes,
        "policy": record.policy,
        "codec": record.codec,
        "lossless": record.lossless,
        "blobs": len(record.refs),
        "identity": dict(record.identity),
    }


def _saved_at(record: Record) -> str:
    return datetime.fromtimestamp(record.made, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _print_result(options: OutputOptions, told: dict[str, Any]) -> None:
    if options.json:
        print_document({"schema": SCHEMA, **told})
        return
    results_console().print(
        ", ".join(f"{key} {value}" for key, value in told.items()), soft_wrap=True
    )
