"""The store as commands see it: where it is, whose sessions are meant, and what came back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.core.errors import LarderError

if TYPE_CHECKING:
    from larder.engine.engine import Engine
    from larder.engine.persistence import ChatPersistence, ResumeResult
    from larder.store.store import Store

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="A folder or an fsspec address.  Default: $LARDER_HOME/store.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="32 random bytes, or 64 hexadecimal digits, under which everything is kept.  "
        "Default: $LARDER_STORE_KEY; without, nothing is hidden.",
    ),
]
CodecName = Annotated[
    str,
    typer.Option(
        "--codec", help="How caches are saved: raw to the bit; int8, int4, entropy in fewer bytes."
    ),
]
QUIET_REASONS = ("", "new", "slower")  # why nothing was restored, where nothing is wrong


def open_store(url: str | None, key_file: Path | None) -> Store:
    """The store of that address.

    Raises:
        StoreError: it cannot be opened, or not with this key.
        InputError: the file is no key.
    """
    from larder.core.settings import home
    from larder.store.encryption import read_key
    from larder.store.store import Store

    key = read_key(key_file)
    return Store(str(home() / "store") if url is None else url, home(), key=key)


def check_codec(name: str) -> None:
    """Raises: UnknownName: there is no such codec."""
    from larder.store.blobs.payloads import is_lossless_codec

    is_lossless_codec(name)


@contextmanager
def open_persistence(
    engine: Engine, url: str | None, codec: str, key_file: Path | None
) -> Iterator[ChatPersistence]:
    """What keeps caches in a store; a store that cannot be opened keeps nothing, and says so.

    Raises:
        StoreError, InputError: there is a key, and it is none, or not the store's.
    """
    from larder.core.settings import LOCAL_PRINCIPAL
    from larder.engine.persistence import NoPersistence, StorePersistence
    from larder.store.encryption import encryption_for, read_key

    key = read_key(key_file)
    try:
        store = open_store(url, key_file)
    except LarderError as error:
        if key is not None:
            raise
        print(f"larder: caches are not saved: {error}", file=sys.stderr)
        yield NoPersistence()
        return
    try:
        yield StorePersistence(
            store, engine.loaded, LOCAL_PRINCIPAL, codec, encryption_for(key, "chats")
        )
    finally:
        store.close()


def print_resume_result(what: str, resumed: ResumeResult) -> None:
    """Say in one line whether it was restored: on a terminal, or where something is wrong."""
    from larder.cli.console import progress_console

    if resumed.reason in QUIET_REASONS:
        progress_console().print(f"{what}: {resumed.summary}")
    else:
        print(f"larder: {what} is {resumed.summary}", file=sys.stderr)
