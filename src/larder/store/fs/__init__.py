"""File systems of the store, opened by their path or address."""

import errno
import secrets

from larder.core.errors import StoreError, StoreFull
from larder.store.fs.base import FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.fs.local import LocalFileSystem

PROBE_FOLDER = "probe"  # folder of files that only show that a place can be written
NO_ROOM_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def open_file_system(url: str) -> FileSystem:
    """File system at a path or address.

    Raises:
        StoreError: no file system of that kind is known.
    """
    protocol, mark, rest = url.partition("://")
    if not mark or protocol in ("file", "local"):
        return LocalFileSystem(rest if mark else url)
    # Imported here because one host with a local store needs none of it.
    from larder.store.fs.remote import RemoteFileSystem

    return RemoteFileSystem(url)


def check_writable(url: str) -> None:
    """Check that a store can be kept at a path or address, by a file that is removed again.

    Raises:
        StoreSlow, StoreFull: it does not answer in time, or has no room; either may pass.
        StoreError: it cannot be written.
    """
    DeadlineExecutor("disk").call(_write_probe, open_file_system(url))


def _write_probe(file_system: FileSystem) -> None:
    path = f"{PROBE_FOLDER}/{secrets.token_hex(8)}"
    try:
        file_system.create(path, path.encode())
        file_system.remove(path)
    except OSError as error:
        why = f"The store at {file_system.url} cannot be written ({error.strerror or error})"
        if error.errno in NO_ROOM_ERRNOS:
            raise StoreFull(f"{why}: make room there, or name another store.") from error
        raise StoreError(
            f"{why}: let this user write there, or name another folder or address for the store."
        ) from error
