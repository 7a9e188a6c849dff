"""Sealed records of prefix chunks beside the blobs, for other machines and index rebuilds.

chunks/<tenant>/<key>.json     a chunk, sealed
chunks/<tenant>/<key>.shared   mark: a machine other than the writer uses the chunk as well
kept/<tenant>/<key>.json       mark: the chunk is retained without a session
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from larder.core.errors import Damaged, StoreError
from larder.store.blobs.blob_store import BlobRef
from larder.store.digests import canonical_json, key_of, open_sealed_json, parse_json, sealed_json
from larder.store.fs.base import FileSystem
from larder.store.fs.deadline import DeadlineExecutor
from larder.store.versions import StoredForm

CHUNKS_FOLDER, KEPT_FOLDER = "chunks", "kept"
CHUNK_SCHEMA = 1
CHUNK_FORM = StoredForm("The record of a prefix chunk", "schema", CHUNK_SCHEMA)
RECORD_SUFFIX, SHARED_SUFFIX = "json", "shared"
_LOG = logging.getLogger("larder.store")


@dataclass(frozen=True)
class PrefixChunk:
    """Keys and values of a run of tokens after one prefix.

    Args:
        row: row in the manifest.
        parent: row of the chunk that it continues; 0 for none.
        start: true position of the first token.
        tokens: encoded by `token_bytes`; masked if the store is encrypted.
        key: name of its record.
        prefix: digest of all tokens of the text up to the chunk's last; tagged if the store is
            encrypted.
        ref: its blob.
    """

    row: int
    parent: int
    start: int
    tokens: bytes
    key: str
    prefix: str
    ref: BlobRef

    @property
    def stop(self) -> int:
        """True position after its last token."""
        return self.start + len(self.tokens) // 4


@dataclass(frozen=True)
class ChunkMatch:
    """Chunk and the number of its tokens that a text shares."""

    chunk: PrefixChunk
    tokens: int


class ChunkRecords:
    """Chunk records on the file system. Safe from threads and processes.

    Args:
        file_system: of the records.
    """

    def __init__(self, file_system: FileSystem, executor: DeadlineExecutor, secret: bytes) -> None:
        self._files, self._executor, self._secret = file_system, executor, secret

    def write(self, tenant: str, key: str, fields: dict[str, Any]) -> bool:
        """Write a chunk record; True if none of its key existed, or a damaged one."""
        if self._create(tenant, key, fields):
            return True
        self._intact(tenant, key)
        return self._create(tenant, key, fields)

    def _create(self, tenant: str, key: str, fields: dict[str, Any]) -> bool:
        path = chunk_record_path(tenant, key)
        try:
            self._executor.call(self._files.create, path, self._sealed(fields))
        except FileExistsError:
            return False
        return True

    def read(self, tenant: str, key: str) -> dict[str, Any] | None:
        """Chunk record; None if it is missing, or damaged and set aside."""
        fields = self._intact(tenant, key)
        return fields if fields is not None and fields.get("schema") == CHUNK_SCHEMA else None

    def _intact(self, tenant: str, key: str) -> dict[str, Any] | None:
        """Fields of a record of any version. One that was changed, or belongs to another chunk, is
        set aside, so that the chunk can be stored again."""
        path = chunk_record_path(tenant, key)
        try:
            fields = self._parsed(path)
            if fields.get("schema") == CHUNK_SCHEMA and _tenant_and_key(fields) != (tenant, key):
                raise Damaged("It belongs to another chunk.")
        except FileNotFoundError:
            return None
        except Damaged as error:
            _LOG.warning("damaged: the chunk record %s is set aside. %s", path, error)
            with suppress(FileNotFoundError, StoreError):
                self._executor.call(self._files.set_aside, path)
            return None
        return fields

    def all(self) -> Iterator[dict[str, Any]]:
        """All intact chunk records."""
        for path in self._executor.call(self._paths, CHUNKS_FOLDER):
            if (fields := self._read(path)) is not None:
                yield fields

    def upgrade(self) -> int:
        """Replace records of earlier versions by those of the present one, each at once; return
        their number. Others are ignored: their tokens are prefilled again."""
        count = 0
        for path in self._executor.call(self._paths, CHUNKS_FOLDER):
            fields = self._open(path)
            if fields is not None and CHUNK_FORM.can_upgrade(fields.get("schema")):
                upgraded = CHUNK_FORM.upgraded(fields, fields["schema"])
                self._executor.call(self._files.replace, path, self._sealed(upgraded))
                count += 1
        return count

    def share(self, tenant: str, key: str) -> None:
        """Mark a chunk as used by a machine other than its writer."""
        with suppress(FileExistsError):
            self._executor.call(
                self._files.create, chunk_record_path(tenant, key, SHARED_SUFFIX), b"{}"
            )

    def is_shared(self, tenant: str, key: str) -> bool:
        """True if a chunk is marked as shared."""
        return (
            self._executor.call(self._files.size, chunk_record_path(tenant, key, SHARED_SUFFIX))
            is not None
        )

    def keep(self, tenant: str, key: str) -> None:
        """Mark a chunk as retained without a session."""
        with suppress(FileExistsError):
            self._executor.call(self._files.create, _kept_marker_path(tenant, key), b"{}")

    def is_retained(self, tenant: str, key: str) -> bool:
        """True if a chunk is marked as retained."""
        return self._executor.call(self._files.size, _kept_marker_path(tenant, key)) is not None

    def retained(self) -> set[tuple[str, str]]:
        """Tenant and key of every retained chunk."""
        words = (path.split("/") for path in self._executor.call(self._paths, KEPT_FOLDER))
        return {
            (each[1], each[2].removesuffix(f".{RECORD_SUFFIX}")) for each in words if len(each) == 3
        }

    def remove(self, tenant: str, keys: Iterable[str]) -> None:
        """Delete chunk records and their marks."""
        for key in keys:
            for path in (
                _kept_marker_path(tenant, key),
                chunk_record_path(tenant, key),
                chunk_record_path(tenant, key, SHARED_SUFFIX),
            ):
                self._executor.call(self._files.remove, path)

    def _read(self, path: str) -> dict[str, Any] | None:
        fields = self._open(path)
        return fields if fields is not None and fields.get("schema") == CHUNK_SCHEMA else None

    def _open(self, path: str) -> dict[str, Any] | None:
        """Fields of a record of any version; None if it is missing or damaged."""
        try:
            return self._parsed(path)
        except (FileNotFoundError, Damaged):
            return None

    def _parsed(self, path: str) -> dict[str, Any]:
        data = self._executor.call(self._files.read, path)
        return parse_json(open_sealed_json(self._secret, "chunk", data))

    def _sealed(self, fields: dict[str, Any]) -> bytes:
        text = canonical_json(fields | {"schema": CHUNK_SCHEMA})
        return sealed_json(self._secret, "chunk", text)

    def _paths(self, folder: str) -> list[str]:
        found = (entry.path for entry in self._files.list_files(folder))
        return [path for path in found if path.endswith(f".{RECORD_SUFFIX}")]


def chunk_record_path(tenant: str, key: str, kind: str = RECORD_SUFFIX) -> str:
    """Path of a chunk record or mark."""
    return f"{CHUNKS_FOLDER}/{tenant}/{key}.{kind}"


def _kept_marker_path(tenant: str, key: str) -> str:
    return f"{KEPT_FOLDER}/{tenant}/{key}.{RECORD_SUFFIX}"


def chunk_to_dict(chunk: PrefixChunk, tenant: str, identity: str, before: str) -> dict[str, Any]:
    """Chunk record as a dictionary.

    Args:
        before: digest of the text before it; empty for the first chunk.
    """
    fields = asdict(chunk) | {"tokens": token_ids_from_bytes(chunk.tokens), "before": before}
    fields |= {"tenant": tenant, "identity": identity}
    return {name: value for name, value in fields.items() if name not in ("row", "parent")}


def chunk_from_dict(fields: dict[str, Any], parent: int) -> PrefixChunk:
    """Chunk from its record, before it has a row.

    Args:
        parent: row of the chunk that it continues.
    """
    return PrefixChunk(
        0,
        parent,
        fields["start"],
        token_bytes(fields["tokens"]),
        fields["key"],
        fields["prefix"],
        BlobRef(**fields["ref"]),
    )


def _tenant_and_key(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Tenant and key of a record."""
    return fields.get("tenant"), fields.get("key")


class PrefixDigest:
    """Running digest of a text's prefix.

    `start` is the true position of the next token.

    Args:
        ids: the text.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.start = ids, 0
        self._digest = hashlib.sha256()

    def digest(self, tokens: Sequence[Any]) -> str:
        """Digest of the text up to here, extended by some tokens.

        Raises:
            Damaged: they are not token ids.
        """
        try:
            digest = self._digest.copy()
            digest.update(token_bytes(tokens))
        except (OverflowError, TypeError, ValueError) as error:
            raise Damaged("A chunk of the saved cache has invalid token ids.") from error
        return digest.hexdigest()

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by some tokens."""
        self._digest.update(token_bytes(tokens))
        self.start += len(tokens)


def token_bytes(ids: Sequence[Any]) -> bytes:
    """Token ids as bytes in an order-preserving encoding.

    Raises:
        OverflowError, TypeError, ValueError: they are not token ids.
    """
    return np.asarray(ids, dtype=">u4").tobytes()


def token_ids_from_bytes(tokens: bytes) -> list[int]:
    """Token ids from `token_bytes`."""
    return np.frombuffer(tokens, dtype=">u4").tolist()


def common_prefix_len(left: bytes, right: bytes) -> int:
    """Number of leading tokens that two texts share."""
    pair = [np.frombuffer(each, dtype=">u4") for each in (left, right)]
    length = min(map(len, pair))
    differing = np.flatnonzero(pair[0][:length] != pair[1][:length])
    return int(differing[0]) if len(differing) else length


def chunk_key(tenant: str, identity: str, parent: str, tokens: bytes) -> str:
    """Key of a chunk beside the blobs."""
    return key_of("chunk", tenant, identity, parent, tokens)


def prefix_digest(ids: Sequence[int]) -> str:
    """Digest of a text, domain-separated from keys."""
    return hashlib.sha256(token_bytes(ids)).hexdigest()
