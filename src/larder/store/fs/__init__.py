"""File systems of the store, opened by their path or address."""

from larder.store.fs.base import FileSystem
from larder.store.fs.local import LocalFileSystem


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
