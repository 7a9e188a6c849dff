"""Contract of the store's file systems: a local folder, or any file system known to fsspec.

Writes are atomic. Paths are relative, made of digests and fixed words only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

TEMPORARY_FOLDER = "temporary"  # folder of incomplete files
QUARANTINE_FOLDER = "damaged"  # folder of damaged objects


@dataclass(frozen=True)
class FileInfo:
    """Path, size and time of an object.

    Args:
        bytes: of its content.
        modified: seconds since 1970; when it was last written or touched.
    """

    path: str
    bytes: int
    modified: float


class FileSystem(ABC):
    """Objects by path. Safe from threads and processes; raises the operating system's errors."""

    url: str

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write a new object durably.

        Raises:
            FileExistsError: it exists.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Write or overwrite an object durably: readers see the old or the new content."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Content of an object.

        Raises:
            FileNotFoundError: it does not exist.
        """

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of an object; None if it does not exist."""

    @abstractmethod
    def touch(self, path: str, data: bytes) -> None:
        """Set the modification time of an object to now; `data` is its content."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object if it exists."""

    @abstractmethod
    def list_files(self, folder: str) -> Iterator[FileInfo]:
        """Every object below a folder."""

    def set_aside(self, path: str) -> None:
        """Move a damaged object to quarantine, so that it can be inspected and written again."""
        try:
            data = self.read(path)
        except FileNotFoundError:
            return
        self.replace(f"{QUARANTINE_FOLDER}/{path.rpartition('/')[2]}", data)
        self.remove(path)
