"""A place that knows how many bytes of records and indexes it holds, blobs left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from larder.store.blobs.blob_store import BLOBS_FOLDER as BLOBS
from larder.store.fs.base import QUARANTINE_FOLDER, TEMPORARY_FOLDER, FileInfo, FileSystem

_OTHERS = (f"{BLOBS}/", f"{QUARANTINE_FOLDER}/", f"{TEMPORARY_FOLDER}/")


class CountingFileSystem(FileSystem):
    """Counts what is written and removed beside the blobs. Safe from threads.

    `beside_bytes` and `written_bytes`, blobs included, are since it was opened, by this process.
    """

    def __init__(self, inner: FileSystem) -> None:
        self.inner, self.url = inner, inner.url
        self.beside_bytes = self.written_bytes = 0
        self._lock = threading.Lock()

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)
        self._count(path, len(data), len(data))

    def replace(self, path: str, data: bytes) -> None:
        before = 0 if path.startswith(_OTHERS) else self.inner.size(path) or 0
        self.inner.replace(path, data)
        self._count(path, len(data) - before, len(data))

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def size(self, path: str) -> int | None:
        return self.inner.size(path)

    def touch(self, path: str, data: bytes) -> None:
        self.inner.touch(path, data)

    def remove(self, path: str) -> None:
        before = 0 if path.startswith(_OTHERS) else self.inner.size(path) or 0
        self.inner.remove(path)
        self._count(path, -before)

    def set_aside(self, path: str) -> None:
        self.inner.set_aside(path)

    def listing(self, folder: str) -> Iterator[FileInfo]:
        return self.inner.listing(folder)

    def _count(self, path: str, count: int, written: int = 0) -> None:
        with self._lock:
            self.written_bytes += written
            if not path.startswith(_OTHERS):
                self.beside_bytes += count
