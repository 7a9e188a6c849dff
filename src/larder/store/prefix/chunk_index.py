"""Prefix index: a radix tree of token chunks in SQLite, matched token by token.

A chunk holds keys and values of `CHUNK_TOKENS` tokens after one prefix. Chunks of one tenant and
one model identity form a tree. Children are ordered by their tokens, so the child that shares most
tokens with a text is a neighbor of the text's place in that order. A child refers to its parent's
row, not to a digest of the prefix: texts whose digests collide stay separate.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from larder.store.blobs.blob_store import BlobRef
from larder.store.encryption import Encryption, NoEncryption
from larder.store.fs.base import FileSystem
from larder.store.fs.deadline import DeadlineExecutor, parallel_map
from larder.store.manifest import Manifest
from larder.store.prefix.chunk_records import (
    ChunkMatch,
    ChunkRecords,
    PrefixChunk,
    chunk_from_dict,
    chunk_key,
    chunk_to_dict,
    common_prefix_len,
    prefix_digest,
    token_bytes,
)

CHUNK_TOKENS = 256
_COLUMNS = "id, parent, start, tokens, key, prefix, digest, bytes"
_UNREFERENCED = "NOT EXISTS (SELECT 1 FROM spans WHERE spans.digest = chunks.digest)"
_DIGESTS = "SELECT tenant, key, digest FROM chunks"
_DELETE_LEAF = (
    f"DELETE FROM chunks WHERE id = ? AND key = ? AND {_UNREFERENCED} AND NOT EXISTS (SELECT 1 "
    "FROM "
    "chunks AS next WHERE (next.tenant, next.identity, next.parent) = "
    "(chunks.tenant, chunks.identity, chunks.id)) RETURNING id"
)


class ChunkIndex:
    """Prefix chunks of all tenants. Safe from threads and processes.

    Args:
        file_system: of the chunk records, for other machines and index rebuilds.
        sealing: encryption of tokens and their digests in the index.
    """

    def __init__(
        self,
        file_system: FileSystem,
        executor: DeadlineExecutor,
        manifest: Manifest,
        secret: bytes,
        sealing: Encryption = NoEncryption(),  # noqa: B008, without state
    ) -> None:
        self._manifest, self._sealing = manifest, sealing
        self._records = ChunkRecords(file_system, executor, secret)
        self._adding = _ConcurrentKeys()

    def match_prefix(self, tenant: str, identity: str, ids: Sequence[int]) -> list[ChunkMatch]:
        """Chunks of the longest stored prefix of a text.

        All but the last share all of their tokens with it.
        """
        found: list[ChunkMatch] = []
        parent, start, parent_key, prefix = 0, 0, "", hashlib.sha256()
        while start < len(ids):
            wanted, before = (
                token_bytes(ids[start : start + CHUNK_TOKENS]),
                _digest_before(prefix, start),
            )
            prefix.update(wanted)
            masked = self._sealing.masked(tenant, before, wanted)
            best = self._nearest(tenant, identity, parent, masked)
            if len(wanted) == 4 * CHUNK_TOKENS and (best is None or best.tokens < CHUNK_TOKENS):
                best = (
                    self._match_other_host(
                        tenant, identity, parent, parent_key, start, wanted, prefix.hexdigest()
                    )
                    or best
                )
            if best is None or not best.tokens:
                break
            found.append(best)
            if best.tokens < len(best.chunk.tokens) // 4:
                break
            parent, start, parent_key = best.chunk.row, best.chunk.stop, best.chunk.key
        return found

    def add(
        self,
        tenant: str,
        identity: str,
        parent: PrefixChunk | None,
        ids: Sequence[int],
        ref: BlobRef,
    ) -> PrefixChunk | None:
        """Index a chunk whose blob is written; None if its parent is gone.

        Args:
            ids: every token of the text up to the chunk's last.
        """
        start = 0 if parent is None else parent.stop
        tokens, above = token_bytes(ids[start:]), "" if parent is None else parent.key
        made = PrefixChunk(
            0,
            0 if parent is None else parent.row,
            start,
            tokens,
            self._key(tenant, identity, above, tokens),
            prefix_digest(ids),
            ref,
        )
        before = prefix_digest(ids[:start]) if start else ""
        # Where digests collide, other machines do without it.
        fields = chunk_to_dict(made, tenant, identity, before)
        with self._adding.of(made.key):
            is_new = self._records.write(tenant, made.key, fields)
            if not is_new and not self._is_own(tenant, made.key, self._adding.count(made.key) - 1):
                self._records.share(tenant, made.key)
            added = self._insert(made, tenant, identity, before)
            if is_new and added is None:
                self._records.remove(tenant, [made.key])
        return added

    def drop(self, chunk: PrefixChunk, tenant: str) -> list[PrefixChunk]:
        """Remove a chunk and its descendants; the caller deletes the blobs."""
        with self._manifest.writing() as rows:
            found = rows(
                "WITH RECURSIVE below(id) AS (SELECT id FROM chunks WHERE id = ? AND key = ? "
                "UNION SELECT chunks.id FROM chunks "
                f"JOIN below ON parent = below.id) SELECT {_COLUMNS} FROM chunks "
                "WHERE id IN (SELECT id FROM below)",
                (chunk.row, chunk.key),
            )
            dropped = [_chunk_from_row(row) for row in found]
            for chunk in dropped:
                rows("DELETE FROM chunks WHERE id = ?", (chunk.row,))
        self._records.remove(tenant, (chunk.key for chunk in dropped))
        return dropped

    def unused(self, tenant: str, refs: Iterable[BlobRef]) -> list[PrefixChunk]:
        """Chunks of these blobs that no indexed session refers to."""
        with self._manifest.reading() as rows:
            found = [
                row
                for ref in refs
                for row in rows(
                    f"SELECT {_COLUMNS} FROM chunks WHERE tenant = ? AND digest = ? AND "
                    f"{_UNREFERENCED}",
                    (tenant, ref.digest),
                )
            ]
        return [_chunk_from_row(row) for row in found]

    def all_unused(self, since: float) -> dict[str, list[PrefixChunk]]:
        """Chunks, by tenant, that no session refers to and that were not read since a time."""
        found = defaultdict[str, list[PrefixChunk]](list)
        with self._manifest.reading() as rows:
            for tenant, *row in rows(
                f"SELECT tenant, {_COLUMNS} FROM chunks WHERE last_used <= ? AND {_UNREFERENCED}",
                (since,),
            ):
                found[tenant].append(_chunk_from_row(row))
        return found

    def keep(self, tenant: str, identity: str, ids: Sequence[int]) -> None:
        """Retain a prefix without a session, on all machines, until its chunks are dropped."""
        for each in self.match_prefix(tenant, identity, ids):
            if each.tokens == len(each.chunk.tokens) // 4:
                self._records.keep(tenant, each.chunk.key)

    def retained(self) -> dict[tuple[str, str], str]:
        """Blob digests of retained chunks, by tenant and key; "" if unknown."""
        with self._manifest.reading() as rows:
            here = {(tenant, key): digest for tenant, key, digest in rows(_DIGESTS)}
        return {
            (tenant, key): here.get((tenant, key)) or self._digest(tenant, key)
            for tenant, key in self._records.retained()
        }

    def is_retained(self, chunk: PrefixChunk, tenant: str) -> bool:
        """True if a chunk is retained, or shared by a machine other than its writer."""
        records = self._records
        return records.is_retained(tenant, chunk.key) or records.is_shared(tenant, chunk.key)

    def remove_unreferenced(self, tenant: str, chunks: Iterable[PrefixChunk]) -> None:
        """Remove the rows of unreferenced chunks without retained descendants; blobs remain."""
        removed: list[str] = []
        with self._manifest.writing() as rows:
            for chunk in sorted(chunks, key=lambda chunk: -chunk.start):
                removed += [chunk.key] if rows(_DELETE_LEAF, (chunk.row, chunk.key)) else []
        parallel_map(lambda key: self._records.remove(tenant, [key]), removed)

    def used(self, shared: Sequence[ChunkMatch]) -> None:
        """Record reads of chunks."""
        now = self._manifest.clock()
        with self._manifest.writing() as rows:
            for each in shared:
                rows(
                    "UPDATE chunks SET last_used = ?, uses = uses + 1 WHERE id = ?",
                    (now, each.chunk.row),
                )

    def all(self) -> list[tuple[str, PrefixChunk, float, int]]:
        """Tenant, chunk, last use and number of uses of every row, parents first."""
        with self._manifest.reading() as rows:
            found = rows(
                f"SELECT tenant, {_COLUMNS}, last_used, uses FROM chunks ORDER BY start, id"
            )
        return [(row[0], _chunk_from_row(row[1:9]), row[9], row[10]) for row in found]

    def upgrade(self) -> int:
        """Carry over chunk records of earlier versions, and index them; return their number."""
        count = self._records.upgrade()
        if count:
            self.rebuild()
        return count

    def rebuild(self) -> None:
        """Index the chunk records beside the blobs."""
        known: dict[tuple[str, str, str], int] = {}
        records = sorted(self._records.all(), key=lambda fields: (fields["start"], fields["key"]))
        for fields in records:
            tenant, identity, before = fields["tenant"], fields["identity"], fields["before"]
            parent = known.get((tenant, identity, before), 0)
            if fields["start"] and not parent:
                continue  # its parent is lost
            chunk = chunk_from_dict(fields, parent)
            if (inserted := self._insert(chunk, tenant, identity, before)) is not None:
                known[tenant, identity, chunk.prefix] = inserted.row

    def _nearest(self, tenant: str, identity: str, parent: int, wanted: bytes) -> ChunkMatch | None:
        """Child that shares most tokens: one of the two neighbors in token order."""
        best: ChunkMatch | None = None
        with self._manifest.reading() as rows:
            for sign, order in (("<=", "DESC"), (">", "ASC")):
                found = rows(
                    f"SELECT {_COLUMNS} FROM chunks WHERE tenant = ? AND identity = ? "
                    f"AND parent = ? AND tokens {sign} ? ORDER BY tokens {order} LIMIT 1",
                    (tenant, identity, parent, wanted),
                )
                for chunk in map(_chunk_from_row, found):
                    count = common_prefix_len(chunk.tokens, wanted)
                    if best is None or count > best.tokens:
                        best = ChunkMatch(chunk, count)
        return best

    def _match_other_host(
        self,
        tenant: str,
        identity: str,
        parent: int,
        parent_key: str,
        start: int,
        wanted: bytes,
        prefix: str,
    ) -> ChunkMatch | None:
        """Chunk that another machine has stored after the same prefix."""
        fields = self._records.read(tenant, self._key(tenant, identity, parent_key, wanted))
        if fields is None or fields["tenant"] != tenant or fields["identity"] != identity:
            return None
        chunk = chunk_from_dict(fields, parent)
        if (chunk.tokens, chunk.start, chunk.prefix) != (wanted, start, prefix):
            return None
        if not self._is_own(tenant, chunk.key, self._adding.count(chunk.key)):
            self._records.share(tenant, chunk.key)
        inserted = self._insert(chunk, tenant, identity, fields["before"])
        return None if inserted is None else ChunkMatch(inserted, CHUNK_TOKENS)

    def _insert(
        self, chunk: PrefixChunk, tenant: str, identity: str, before: str
    ) -> PrefixChunk | None:
        """Insert a chunk; an existing row gets the given blob.

        None if the row of its parent is gone or reused.
        """
        tokens = self._sealing.masked(tenant, before, chunk.tokens)
        prefix = self._sealing.tag(tenant, chunk.prefix)
        parent = chunk.parent, self._sealing.tag(tenant, before) if before else ""
        with self._manifest.writing() as rows:
            if chunk.parent and not rows(
                "SELECT 1 FROM chunks WHERE id = ? AND prefix = ?", parent
            ):
                return None
            rows(
                "INSERT INTO chunks (tenant, identity, parent, tokens, start, key, prefix, digest, "
                "bytes, last_used, uses) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO "
                "UPDATE SET digest = excluded.digest, bytes = excluded.bytes",
                (tenant, identity, chunk.parent, tokens, chunk.start, chunk.key)
                + (prefix, chunk.ref.digest, chunk.ref.bytes, self._manifest.clock()),
            )
            [row] = rows(
                f"SELECT {_COLUMNS} FROM chunks WHERE tenant = ? AND identity = ? "
                "AND parent = ? AND tokens = ?",
                (tenant, identity, chunk.parent, tokens),
            )
        return _chunk_from_row(row)

    def _is_own(self, tenant: str, key: str, num_adding: int) -> bool:
        """True if a recorded chunk is in the index, or is about to be.

        Args:
            num_adding: other threads that are adding it, counted before the index is read.
        """
        if num_adding:
            return True
        with self._manifest.reading() as rows:
            return bool(rows("SELECT 1 FROM chunks WHERE tenant = ? AND key = ?", (tenant, key)))

    def _digest(self, tenant: str, key: str) -> str:
        """Digest of a recorded chunk's blob; empty if unknown."""
        fields = self._records.read(tenant, key)
        return "" if fields is None else str(fields["ref"]["digest"])

    def _key(self, tenant: str, identity: str, parent: str, tokens: bytes) -> str:
        return self._sealing.tag(tenant, chunk_key(tenant, identity, parent, tokens))


class _ConcurrentKeys:
    """Keys that threads of this process are adding. Safe from threads."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def count(self, key: str) -> int:
        """Number of threads that are adding a key."""
        return self._counts[key]

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Context in which a key is being added."""
        with self._lock:
            self._counts[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[key] -= 1
                self._counts = +self._counts


def _digest_before(prefix: Any, start: int) -> str:
    """Digest of the text before a chunk; empty at the beginning."""
    return prefix.hexdigest() if start else ""


def _chunk_from_row(row: Sequence[Any]) -> PrefixChunk:
    return PrefixChunk(*row[:6], BlobRef(*row[6:]))  # pyright: ignore[reportCallIssue]
