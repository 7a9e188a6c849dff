"""Where a store keeps its objects: a local folder, or any file system that fsspec knows.

An object appears whole or not at all. Paths are relative, made of digests and fixed words only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

TEMPORARY_FOLDER = "temporary"  # folder of what is not yet whole
QUARANTINE_FOLDER = "damaged"  # folder of what was found damaged


@dataclass(frozen=True)
class FileInfo:
    """An object that lies there.

    Args:
        bytes: of its content.
        modified: seconds since 1970; when it was last written or touched.
    """

    path: str
    bytes: int
    modified: float


class FileSystem(ABC):
    """Objects by path. Safe from threads and processes; errors are the operating system's."""

    url: str

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write an object that is not there yet, durably.

        Raises:
            FileExistsError: somebody else has written it.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Write an object durably, whether it is there or not: readers see the old or the new."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """All of an object.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of an object; None where there is none."""

    @abstractmethod
    def touch(self, path: str, data: bytes) -> None:
        """Have an object count as written now; `data` is what it holds."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object; nothing happens where there is none."""

    @abstractmethod
    def list_files(self, folder: str) -> Iterator[FileInfo]:
        """Every object below a folder."""

    def set_aside(self, path: str) -> None:
        """Move an object out of the way, so that it can be looked at and written anew."""
        try:
            data = self.read(path)
        except FileNotFoundError:
            return
        self.replace(f"{QUARANTINE_FOLDER}/{path.rpartition('/')[2]}", data)
        self.remove(path)


def open_file_system(url: str) -> FileSystem:
    """The place that a path or address names.

    Raises:
        StoreError: no file system of that kind is known.
    """
    from larder.store.fs.local import LocalFileSystem
    from larder.store.fs.remote import RemoteFileSystem

    protocol, mark, rest = url.partition("://")
    if not mark:
        return LocalFileSystem(url)
    return LocalFileSystem(rest) if protocol in ("file", "local") else RemoteFileSystem(url)
