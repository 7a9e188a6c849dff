"""Content-addressed blobs: immutable objects named by the digest of their bytes.

    blobs/<aa>/<digest>.safetensors

Blobs are immutable and written atomically, so that two writers of the same blob do not conflict. A
blob that does not match its digest is quarantined when it is read, and can be written again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from larder.core.errors import Damaged, StoreError
from larder.store.digests import digest_of, digests_equal, is_digest
from larder.store.fs.base import QUARANTINE_FOLDER, TEMPORARY_FOLDER, FileInfo, FileSystem
from larder.store.fs.deadline import DeadlineExecutor, no_op
from larder.store.fs.wrappers import BLOBS_FOLDER

BLOB_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class BlobRef:
    """Reference to a blob: digest and size.

    Args:
        digest: hexadecimal blake3 of the bytes.
        bytes: size.
    """

    digest: str
    bytes: int


class BlobStore:
    """Content-addressed blobs on a file system. Safe from threads and processes.

    Args:
        file_system: of the blobs.
        executor: of calls to it.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        file_system: FileSystem,
        executor: DeadlineExecutor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.file_system, self._executor, self._clock = file_system, executor, clock

    def put(self, data: bytes, ended: Callable[[], None] = no_op) -> BlobRef:
        """Write bytes under their digest; existing blobs are not written again.

        Args:
            ended: as in `DeadlineExecutor.call`.

        Raises:
            StoreFull, StoreError: the disk is full, or fails.
            StoreSlow: it took too long; the blob may appear later.
        """
        ref = BlobRef(digest_of(data), len(data))
        self._executor.call(self._put, blob_path(ref.digest), data, ended=ended)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """Read and verify a blob.

        Raises:
            Damaged: it is missing, or does not match its digest and is quarantined.
            StoreSlow: it took too long.
            StoreError: the disk fails.
        """
        path = blob_path(ref.digest)
        try:
            data = self._executor.call(self.file_system.read, path)
        except FileNotFoundError as error:
            raise Damaged(
                f"Blob {ref.digest[:12]} is missing: its content must be computed again."
            ) from error
        if digests_equal(digest_of(data), ref.digest):
            return data
        self._set_aside(path)
        raise Damaged(
            f"Blob {ref.digest[:12]} has {len(data)} bytes that are not the {ref.bytes} written: "
            "it is set aside, and its content must be computed again."
        )

    def has(self, ref: BlobRef) -> bool:
        """True if a blob of that digest and size exists; its content is not read."""
        return self.size(ref.digest) == ref.bytes

    def size(self, digest: str) -> int | None:
        """Bytes of the file under a digest; None if there is none."""
        return self._executor.call(self.file_system.size, blob_path(digest))

    def delete(self, digest: str, ended: Callable[[], None] = no_op) -> tuple[int, bool]:
        """Remove a blob; return its bytes, and True if a quarantined copy exists instead.

        Args:
            ended: as in `DeadlineExecutor.call`.

        Raises:
            StoreSlow: it took too long; the blob may go later.
            StoreError: the disk fails.
        """
        return self._executor.call(self._remove, blob_path(digest), ended=ended)

    def sizes(self) -> dict[str, int]:
        """Bytes of every blob by digest."""
        entries = self._executor.call(self._listed, BLOBS_FOLDER)
        return {digest: entry.bytes for entry in entries if (digest := digest_in_path(entry.path))}

    def sweep(
        self,
        live: Collection[str],
        grace_seconds: float,
        delete: Callable[[BlobRef], int] | None = None,
    ) -> int:
        """Remove unreferenced blobs and temporary files; return the bytes freed.

        Args:
            live: referenced digests.
            grace_seconds: age up to which unreferenced blobs may be part of a save in progress.
            delete: deletes a blob if it may be deleted, and returns the bytes freed; None deletes
                directly.
        """
        keep, before, freed = frozenset(live), self._clock() - grace_seconds, 0
        for entry in self._executor.call(self._listed, BLOBS_FOLDER, TEMPORARY_FOLDER):
            digest = digest_in_path(entry.path)
            if digest in keep or entry.modified > before:
                continue
            if digest and delete is not None:
                freed += delete(BlobRef(digest, entry.bytes))
            else:
                self._executor.call(self.file_system.remove, entry.path)
                freed += entry.bytes
        return freed

    def _put(self, path: str, data: bytes) -> None:
        if self.file_system.size(path) == len(data):
            self.file_system.touch(path, data)  # so that a sweep leaves it until it is referred to
        else:
            self.file_system.replace(path, data)

    def _remove(self, path: str) -> tuple[int, bool]:
        there = self.file_system.size(path)
        if there is None:
            aside = f"{QUARANTINE_FOLDER}/{path.rpartition('/')[2]}"
            return 0, self.file_system.size(aside) is not None
        self.file_system.remove(path)
        return there, False

    def _listed(self, *folders: str) -> list[FileInfo]:
        return [entry for folder in folders for entry in self.file_system.list_files(folder)]

    def _set_aside(self, path: str) -> None:
        try:
            self._executor.call(self.file_system.set_aside, path)
        except StoreError:
            return  # a disk that cannot be written: the next read finds the damage again


def blob_path(digest: str) -> str:
    """Path of a blob.

    Raises:
        Damaged: it is not a digest.
    """
    if not is_digest(digest):
        raise Damaged(f"{digest[:80]!r} is no digest: the record that refers to it is damaged.")
    return f"{BLOBS_FOLDER}/{digest[:2]}/{digest}{BLOB_SUFFIX}"


def digest_in_path(path: str) -> str:
    """Digest in a blob's path; empty for any other path."""
    name = path.rpartition("/")[2].removesuffix(BLOB_SUFFIX)
    return name if is_digest(name) and path == blob_path(name) else ""
