"""The store as commands see it: where it is, whose sessions are meant, and what came back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from larder.core.errors import LarderError

if TYPE_CHECKING:
    from larder.engine.engine import Engine
    from larder.engine.keeping import Keeper, Resumed
    from larder.store.store import Store

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="A folder or an fsspec address.  Default: $LARDER_HOME/store.",
    ),
]
CodecName = Annotated[
    str,
    typer.Option(
        "--codec", help="How caches are saved: raw to the bit; int8, int4, entropy in fewer bytes."
    ),
]
QUIET = ("", "new", "slower")  # why nothing was restored, where nothing is wrong


def opened(url: str | None) -> Store:
    """The store of that address.

    Raises:
        StoreError: it cannot be opened.
    """
    from larder.core.settings import home
    from larder.store.store import Store

    return Store(str(home() / "store") if url is None else url, home())


def check_codec(name: str) -> None:
    """Raises: UnknownName: there is no such codec."""
    from larder.store.envelopes import is_lossless

    is_lossless(name)


@contextmanager
def keeping(engine: Engine, url: str | None, codec: str) -> Iterator[Keeper]:
    """What keeps caches in a store; a store that cannot be opened keeps nothing, and says so."""
    from larder.engine.keeping import StoreKeeper, Unkept

    try:
        store = opened(url)
    except LarderError as error:
        print(f"larder: caches are not saved: {error}", file=sys.stderr)
        yield Unkept()
        return
    try:
        yield StoreKeeper(store, engine.loaded, codec=codec)
    finally:
        store.close()


def tell_resumed(what: str, resumed: Resumed) -> None:
    """Say in one line whether it was restored: on a terminal, or where something is wrong."""
    from larder.cli.showing import asides

    if resumed.reason in QUIET:
        asides().print(f"{what}: {resumed.said}")
    else:
        print(f"larder: {what} is {resumed.said}", file=sys.stderr)
