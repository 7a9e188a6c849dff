"""File systems around another: encryption of records, and counters of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from larder.store.encryption import Encryption
from larder.store.fs.base import QUARANTINE_FOLDER, TEMPORARY_FOLDER, FileInfo, FileSystem

BLOBS_FOLDER = "blobs"
# What is not metadata: blobs, and copies of anything.
_OTHER_FOLDERS = (f"{BLOBS_FOLDER}/", f"{QUARANTINE_FOLDER}/", f"{TEMPORARY_FOLDER}/")


class _FileSystemWrapper(FileSystem):
    """File system that forwards every call to another."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner, self.url = inner, inner.url

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)

    def replace(self, path: str, data: bytes) -> None:
        self.inner.replace(path, data)

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def size(self, path: str) -> int | None:
        return self.inner.size(path)

    def touch(self, path: str, data: bytes) -> None:
        self.inner.touch(path, data)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def set_aside(self, path: str) -> None:
        self.inner.set_aside(path)

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        return self.inner.list_files(folder)


class EncryptedFileSystem(_FileSystemWrapper):
    """File system whose records are encrypted per tenant.

    A path begins with a fixed word and the tenant. A record that was moved to another path does not
    open.
    """

    def __init__(self, inner: FileSystem, encryption: Encryption) -> None:
        super().__init__(inner)
        self._encryption = encryption

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, self._encrypted(path, data))

    def replace(self, path: str, data: bytes) -> None:
        self.inner.replace(path, self._encrypted(path, data))

    def read(self, path: str) -> bytes:
        return self._encryption.decrypt(_tenant(path), self.inner.read(path), path)

    def touch(self, path: str, data: bytes) -> None:
        self.inner.touch(path, self._encrypted(path, data))

    def _encrypted(self, path: str, data: bytes) -> bytes:
        return self._encryption.encrypt(_tenant(path), data, path)


class CountingFileSystem(_FileSystemWrapper):
    """File system that counts metadata and written bytes. Safe from threads.

    `metadata_bytes` and `written_bytes`, blobs included, are since it was opened, by this process.
    """

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self.metadata_bytes = self.written_bytes = 0
        self._lock = threading.Lock()

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)
        self._count(path, len(data), len(data))

    def replace(self, path: str, data: bytes) -> None:
        before = self._metadata_size(path)
        self.inner.replace(path, data)
        self._count(path, len(data) - before, len(data))

    def remove(self, path: str) -> None:
        before = self._metadata_size(path)
        self.inner.remove(path)
        self._count(path, -before)

    def _metadata_size(self, path: str) -> int:
        return 0 if path.startswith(_OTHER_FOLDERS) else self.inner.size(path) or 0

    def _count(self, path: str, change: int, written: int = 0) -> None:
        with self._lock:
            self.written_bytes += written
            if not path.startswith(_OTHER_FOLDERS):
                self.metadata_bytes += change


def _tenant(path: str) -> str:
    return path.split("/")[1]
