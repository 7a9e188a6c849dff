"""Remote file system: any that fsspec knows.

Object stores write atomically and can refuse to replace an object. On other file systems an object
is uploaded under a temporary name and moved; two machines that create the same object there at the
same time may both succeed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from larder.core.errors import StoreError
from larder.store.fs.base import TEMPORARY_FOLDER, FileInfo, FileSystem

# Protocols with atomic writes.
ATOMIC_PROTOCOLS = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss"}
)


class RemoteFileSystem(FileSystem):
    """Objects at an fsspec address.

    Raises:
        StoreError: fsspec knows no such kind of file system, or lacks the package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = _open_url(self.url)
        self._is_atomic = url.partition("://")[0] in ATOMIC_PROTOCOLS

    def create(self, path: str, data: bytes) -> None:
        with _translated_errors():
            if self._is_atomic:
                self._system.pipe_file(self._at(path), data, mode="create")
                return
            if self._system.exists(self._at(path)):
                raise FileExistsError(self._at(path))
            self._moved(path, data)

    def replace(self, path: str, data: bytes) -> None:
        with _translated_errors():
            if self._is_atomic:
                self._system.pipe_file(self._at(path), data)
                return
            self._moved(path, data)

    def read(self, path: str) -> bytes:
        with _translated_errors():
            return self._system.cat_file(self._at(path))

    def size(self, path: str) -> int | None:
        try:
            with _translated_errors():
                self._system.invalidate_cache()
                return int(self._system.size(self._at(path)))
        except FileNotFoundError:
            return None

    def touch(self, path: str, data: bytes) -> None:
        """Write the content again: object stores have no other modification time."""
        self.replace(path, data)

    def remove(self, path: str) -> None:
        try:
            with _translated_errors():
                self._system.rm_file(self._at(path))
        except FileNotFoundError:
            return

    def list_files(self, folder: str) -> Iterator[FileInfo]:
        try:
            with _translated_errors():
                self._system.invalidate_cache()
                found = self._system.find(self._at(folder), detail=True)
        except FileNotFoundError:
            return
        for name, info in found.items():
            path = name.removeprefix(f"{self._root}/")
            yield FileInfo(path, int(info["size"]), _modified_seconds(info))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _moved(self, path: str, data: bytes) -> None:
        temporary = self._at(f"{TEMPORARY_FOLDER}/{secrets.token_hex(8)}")
        self._system.makedirs(temporary.rpartition("/")[0], exist_ok=True)
        self._system.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(temporary, data)
        self._system.mv(temporary, self._at(path))


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Context that translates errors of a file system's client to `OSError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__.partition(".")[0] in ("builtins", "larder"):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


def _open_url(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise StoreError(
            f"The store's address {url!r} cannot be opened ({error}): take a folder, or install "
            "the fsspec package for that kind of address."
        ) from error


def _modified_seconds(info: dict[str, Any]) -> float:
    """Modification time of an object; 0 if the file system does not report it."""
    for name in ("mtime", "LastModified", "last_modified", "created", "updated"):
        when = info.get(name)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return 0.0
