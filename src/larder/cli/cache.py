"""`larder cache`: list, inspect, verify, export, import, remove, upgrade and encrypt sessions."""

from __future__ import annotations

import sys
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
from larder.core.errors import Damaged, InputError, Refused, UsageError
from larder.core.home import LOCAL_PRINCIPAL, home

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from larder.store.maintenance import VerificationResult
    from larder.store.sessions.records import Record
    from larder.store.store import Store

app = typer.Typer(
    cls=HelpGroup,
    add_completion=False,
    help="List, show, verify, export, import, remove, upgrade, seal sessions.",
)
Name = Annotated[str, typer.Argument(metavar="SESSION", help="Its name.")]


@dataclass(frozen=True)
class StoreOptions(OutputOptions):
    """Store and encryption key."""

    store: StoreUrl = None
    key_file: KeyFile = None


@dataclass(frozen=True)
class SessionOptions(StoreOptions):
    """Store, encryption key and owner of sessions."""

    owner: Annotated[
        str, typer.Option(metavar="PRINCIPAL", help="Owner of the sessions: an API user's name.")
    ] = LOCAL_PRINCIPAL


@app.command("list")
@command
def list_all(options: SessionOptions) -> None:
    """List the sessions of an owner, most recently used first."""
    with _open_store(options) as store:
        records = store.sessions.heads(options.owner)
    if options.json:
        print_document({"schema": SCHEMA, "sessions": [_record_document(each) for each in records]})
        return
    if not records:
        results_console().print("No sessions are stored.")
        return
    table = make_table("session", "policy", "codec", "saved", "tokens", "bytes", "states", texts=4)
    for each in records:
        table.add_row(
            each.name,
            each.policy or "tokens only",
            each.codec,
            _saved_at(each),
            str(each.num_tokens),
            format_bytes(sum(ref.bytes for ref in each.refs)),
            str(each.epoch),
        )
    results_console().print(table)


@app.command("show")
@command
def show(name: Name, options: SessionOptions) -> None:
    """Show the stored state of a session, and what its cache depends on."""
    with _open_store(options) as store:
        record = _session_record(store, options, name)
        states = store.parts.manifest.epochs(record.key)
    document = _record_document(record) | {"states": states}
    if options.json:
        print_document({"schema": SCHEMA, **document})
        return
    table = make_table("", "", texts=2)
    for key, value in document.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for inner, each in rows:
            table.add_row(f"{key} {inner}".strip(), str(each))
    results_console().print(table)


@app.command("verify")
@command
def verify(
    options: SessionOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="SESSION", help="Its name.  Default: all.")
    ] = None,
) -> None:
    """Compare every stored byte of sessions with its digest; exit code 1 if any differs."""
    with _open_store(options) as store:
        records = (
            store.sessions.heads(options.owner)
            if name is None
            else [_session_record(store, options, name)]
        )
        checked = store.maintenance.verify(records)
        refused = store.maintenance.refused_records() if name is None else {}
        freed = store.maintenance.sweep() if name is None else 0
    _check_intact(checked, refused)
    documents = [{"session": c.record.name, "problems": list(c.problems)} for c in checked]
    if options.json:
        print_document({"schema": SCHEMA, "sessions": documents, "freed_bytes": freed})
    else:
        results_console().print(
            f"{len(checked)} sessions are intact; {format_bytes(freed)} of unused blobs deleted."
        )


def _check_intact(checked: Sequence[VerificationResult], refused: Mapping[str, str]) -> None:
    """Raise Damaged if a session has problems, or there are records of other versions."""
    damaged = [each for each in checked if each.problems]
    parts = list[str]()
    if damaged:
        problems = " ".join(f"{each.record.name}: {' '.join(each.problems)}" for each in damaged)
        parts.append(
            f"{len(damaged)} of {len(checked)} sessions are damaged. Those with intact tokens "
            f"are prefilled again at their next use. {problems}"
        )
    known = {each.record.path for each in damaged}
    if others := [f"{path}: {why}" for path, why in refused.items() if path not in known]:
        parts.append(
            f"{len(others)} records are of other versions, so that nothing unused was deleted. "
            f"{' '.join(others)}"
        )
    if parts:
        raise Damaged(" ".join(parts))


@app.command("export")
@command
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    options: SessionOptions,
) -> None:
    """Write a session with its cache to one file."""
    if file.exists():
        raise InputError(f"{file} exists: take another name, or remove it first.")
    with _open_store(options) as store:
        data = store.sessions.export(_session_record(store, options, name))
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}).") from error
    _print_result(options, {"session": name, "file": str(file), "bytes": len(data)})


@app.command("import")
@command
def import_session(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that 'export' wrote.")],
    name: Name,
    options: SessionOptions,
) -> None:
    """Create a session from an exported file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from error
    with _open_store(options) as store:
        record = store.sessions.import_file(data, options.owner, name)
    _print_result(options, {"session": name, "tokens": record.num_tokens, "bytes": len(data)})


@app.command("remove")
@command
def remove(name: Name, options: SessionOptions) -> None:
    """Remove a session, and delete the blobs that no other session refers to."""
    with _open_store(options) as store:
        freed = store.sessions.remove(options.owner, name)
    _print_result(options, {"session": name, "freed_bytes": freed})


@app.command("upgrade")
@command
def upgrade(options: StoreOptions) -> None:
    """Carry over what earlier versions wrote: sessions, chats, and the server's archive.

    It may be interrupted, and run again. Stop servers of the earlier version first.
    """
    from larder.server.http.archive import Archive
    from larder.session.transcript.chat_log_file import upgrade_chat_logs
    from larder.store.encryption import encryption_for, read_key

    has_others = _archive_path().exists() or any((home() / "sessions").glob("*.json"))
    with _open_store(options) as store:
        _check_exists(store, is_needed=options.store is not None or not has_others)
        result = store.maintenance.upgrade()
    key = read_key(options.key_file)
    if (archive := _archive_path()).exists():
        Archive(archive, sealing=encryption_for(key, "archive")).close()
    chats, refused = upgrade_chat_logs(encryption_for(key, "chats"))
    if refused := {**result.refused, **refused}:
        reasons = " ".join(f"{path}: {why}" for path, why in refused.items())
        raise Refused(f"{len(refused)} records and chats are left as they are. {reasons}", "format")
    counts = {"records": result.records, "chunks": result.chunks, "chats": chats}
    _print_result(options, {f"upgraded_{name}": count for name, count in counts.items()})


@app.command("seal")
@command
def seal(options: OutputOptions, key_file: KeyFile = None) -> None:
    """Encrypt what was written without a key: the server's archive, and chats.

    Authors and order are taken over unverified. Stop the server first.
    """
    from larder.server.http.archive import seal_archive
    from larder.session.transcript.chat_log_file import seal_chat_logs
    from larder.store.encryption import encryption_for, read_key

    key = read_key(key_file)
    if key is None:
        raise UsageError("There is no encryption key: give --key-file FILE.")
    documents = seal_archive(_archive_path(), encryption_for(key, "archive"))
    _print_result(
        options, {"documents": documents, "chats": seal_chat_logs(encryption_for(key, "chats"))}
    )


def _archive_path() -> Path:
    return home() / "server" / "archive.sqlite"


@contextmanager
def _open_store(options: StoreOptions) -> Iterator[Store]:
    store = open_store(options.store, options.key_file)
    try:
        yield store
    finally:
        store.close()


def _check_exists(store: Store, is_needed: bool) -> None:
    """Raise InputError if nothing is at the store's address and `is_needed`; otherwise report
    that on stderr."""
    file_system = store.parts.file_system
    if next(file_system.list_files(""), None) is not None:
        return
    message = f"There is no store at {file_system.url}: name another by --store, or LARDER_HOME."
    if is_needed:
        raise InputError(message)
    print(f"larder: {message}", file=sys.stderr)


def _session_record(store: Store, options: SessionOptions, name: str) -> Record:
    by_name = {record.name: record for record in store.sessions.heads(options.owner)}
    if name not in by_name:
        raise InputError(f"There is no session {name!r}: 'larder cache list' shows all names.")
    return by_name[name]


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


def _print_result(options: OutputOptions, result: dict[str, Any]) -> None:
    if options.json:
        print_document({"schema": SCHEMA, **result})
        return
    results_console().print(
        ", ".join(f"{key} {value}" for key, value in result.items()), soft_wrap=True
    )
