"""Store options of commands, opening of a store, and the report of a restore."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.core.errors import LarderError, StoreError, StoreFull, StoreSlow, UsageError

if TYPE_CHECKING:
    from larder.engine.engine import Engine
    from larder.engine.layer_transfer import LayerTransfer
    from larder.engine.persistence import ChatPersistence, ResumeResult
    from larder.store.store import Store
    from larder.store.stream_controller import StreamController

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
        help="Encryption key: 32 random bytes, or 64 hexadecimal digits.  "
        "Default: $LARDER_STORE_KEY; without a key nothing is encrypted.",
    ),
]
CodecName = Annotated[
    str,
    typer.Option(
        "--codec",
        help="Encoding of saved caches: raw is bit-exact; int8, int4, entropy take fewer bytes; "
        "q4 as int4, attended to without decoding; "
        "predictive, predictive12, predictive16 an eighth to a sixteenth of bfloat16's, after "
        "`larder train predictive`; kvtc and kvtc16 as much, after `larder train kvtc`; cachegen "
        "is entropy at three levels, of which a restore loads what --resume-deadline allows.",
    ),
]
ResumeDeadline = Annotated[
    float | None,
    typer.Option(
        "--resume-deadline",
        metavar="SECONDS",
        help="Time in which a cache saved with --codec cachegen is restored: chunk by chunk, at "
        "the finest level that comes in time, or from its text.  Default: the finest level.",
    ),
]
ShareLayers = Annotated[
    list[int],
    typer.Option(
        "--share-layer",
        metavar="LAYER",
        help="Layer before which hidden states are saved, too, so that models tuned from the same "
        "base can take what is read (--reuse-from); may be repeated.",
    ),
]
ReuseFrom = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Take contexts and saved caches that this model of the same shape has shared.",
    ),
]
RecomputeLayers = Annotated[
    str | None,
    typer.Option(
        metavar="START-STOP",
        help="With --reuse-from: layers that are computed again, such as 10-30 for 10 to 29.",
    ),
]
DEFAULT_CODEC = "raw"  # valid without an import of the store
QUIET_REASONS = ("", "new", "slower")  # reasons for no restore that are no fault


def streaming_of(deadline: float | None) -> StreamController:
    """Controller of restores within a deadline; None for none.

    Raises:
        BadParameter: it is not positive.
    """
    from larder.store.stream_controller import StreamController

    return StreamController() if deadline is None else StreamController(deadline)


def open_store(url: str | None, key_file: Path | None) -> Store:
    """Store at an address; by default in the home folder.

    Raises:
        StoreError: it cannot be opened, or not with this key.
        InputError: the file does not hold a key.
    """
    from larder.core.home import home
    from larder.store.encryption import read_key
    from larder.store.store import Store

    return Store(store_url(url), home(), key=read_key(key_file))


def store_url(url: str | None) -> str:
    """Address of a store; by default in the home folder."""
    from larder.core.home import home

    return str(home() / "store") if url is None else url


def check_codec(name: str, resume_deadline: float | None = None) -> None:
    """Check a codec and the deadline of restores.

    Raises:
        UnknownName: there is no such codec.
        BadParameter: the deadline is not positive.
    """
    if resume_deadline is not None:
        streaming_of(resume_deadline)
    if name == DEFAULT_CODEC:
        return
    from larder.store.blobs.payloads import is_lossless_codec

    is_lossless_codec(name)


def layer_transfer(
    share_layers: list[int], reuse_from: str | None, recompute_layers: str | None
) -> LayerTransfer | None:
    """Layers that a model shares with others, or takes from one; None for neither.

    Raises:
        UsageError: a layer or a range is malformed, or one option lacks the other.
    """
    if not (share_layers or reuse_from or recompute_layers):
        return None
    from larder.engine.layer_transfer import LayerTransfer, check_state_layers, parse_layers

    check_state_layers(share_layers)
    if (reuse_from is None) != (recompute_layers is None):
        raise UsageError(
            "--reuse-from and --recompute-layers go together: name the model, and the layers that "
            "are computed again (benchmarks/layer_ranges.py measures ranges)."
        )
    layers = (0, 0) if recompute_layers is None else parse_layers(recompute_layers)
    return LayerTransfer(tuple(sorted(set(share_layers))), reuse_from or "", layers)


def check_store_access(url: str) -> None:
    """Check that a store can be written; one that is slow or full now is reported on stderr.

    Raises:
        StoreError: it cannot be written.
    """
    from larder.store.fs import check_writable

    try:
        check_writable(url)
    except (StoreSlow, StoreFull) as error:
        print(f"larder: turns are not durable until the store takes them: {error}", file=sys.stderr)


def _print_if_unwritable(url: str) -> None:
    """Print one line on stderr if caches cannot be written to a folder or address now."""
    from larder.store.fs import check_writable

    try:
        check_writable(url)
    except StoreError as error:
        print(f"larder: caches are not saved: {error}", file=sys.stderr)


@contextmanager
def open_persistence(
    engine: Engine,
    url: str | None,
    codec: str,
    key_file: Path | None,
    resume_deadline: float | None = None,
    layers: LayerTransfer | None = None,
) -> Iterator[ChatPersistence]:
    """Persistence of caches in a store.

    Without a key, a store that cannot be opened is reported on stderr and nothing is saved. A store
    that cannot be written is reported, too, and what it holds is read.

    Raises:
        StoreError, InputError: the key is invalid, or the store cannot be opened with it.
    """
    from larder.core.home import LOCAL_PRINCIPAL
    from larder.engine.layer_transfer import LayerTransfer
    from larder.engine.persistence import NoPersistence
    from larder.engine.store_persistence import StorePersistence
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
    _print_if_unwritable(store_url(url))
    try:
        yield StorePersistence(
            store,
            engine.loaded,
            LOCAL_PRINCIPAL,
            codec,
            encryption_for(key, "chats"),
            streaming_of(resume_deadline),
            layers or LayerTransfer(),
        )
    finally:
        store.close()


def print_resume_result(name: str, resumed: ResumeResult) -> None:
    """Print one line about a restore: on a terminal, and always if it failed, in part or wholly,
    or was of another codec."""
    from larder.cli.console import progress_console

    if resumed.reason in QUIET_REASONS and not resumed.codec:
        progress_console().print(f"{name}: {resumed.summary}")
    else:
        verb = " is" if resumed.state is None else ":"
        print(f"larder: {name}{verb} {resumed.summary}", file=sys.stderr)
