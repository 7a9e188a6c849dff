"""Which beginnings of texts are kept, found token by token.

A chunk holds keys and values of `TOKENS` tokens behind one known beginning. Chunks of one tenant
and one identity form a tree; children of a chunk are ordered by their tokens, so the one that
shares most with a text stands next to where the text would be. A chunk belongs to its parent's
row, which was itself chosen by its tokens: no digest decides what follows what, so two texts whose
digests collide are still two.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from larder.store.at_once import at_once
from larder.store.blobs import Ref
from larder.store.chunk_notes import Chunk, ChunkNotes, Shared, chunk_of, told_of
from larder.store.deadline import Guard
from larder.store.manifest import Manifest
from larder.store.places import Place
from larder.store.sealing import Sealing, Unsealed
from larder.store.wording import chunk_key, common, prefix_of, spelled

TOKENS = 256
_COLUMNS = "id, parent, start, tokens, key, prefix, digest, bytes"
_UNUSED = "NOT EXISTS (SELECT 1 FROM spans WHERE spans.digest = chunks.digest)"
_DIGESTS = "SELECT tenant, key, digest FROM chunks"
_LEAVE = (
    f"DELETE FROM chunks WHERE id = ? AND key = ? AND {_UNUSED} AND NOT EXISTS (SELECT 1 FROM "
    "chunks AS next WHERE (next.tenant, next.identity, next.parent) = "
    "(chunks.tenant, chunks.identity, chunks.id)) RETURNING id"
)


class Chunks:
    """The chunks of all tenants. Safe from threads and processes.

    Args:
        place: where a chunk is told of for other machines, and for building the index again.
        sealing: how tokens and their digests stand in the index.
    """

    def __init__(
        self,
        place: Place,
        guard: Guard,
        manifest: Manifest,
        secret: bytes,
        sealing: Sealing = Unsealed(),  # noqa: B008, without state
    ) -> None:
        self._manifest, self._sealing = manifest, sealing
        self._notes = ChunkNotes(place, guard, secret)

    def longest(self, tenant: str, identity: str, ids: Sequence[int]) -> list[Shared]:
        """Chunks that together hold the longest beginning of a text that is kept.

        All but the last share all of their tokens with it.
        """
        found: list[Shared] = []
        parent, start, parent_key, prefix = 0, 0, "", hashlib.sha256()
        while start < len(ids):
            wanted, before = spelled(ids[start : start + TOKENS]), _before(prefix, start)
            prefix.update(wanted)
            masked = self._sealing.masked(tenant, before, wanted)
            best = self._nearest(tenant, identity, parent, masked)
            if len(wanted) == 4 * TOKENS and (best is None or best.tokens < TOKENS):
                told = (tenant, identity, parent, parent_key, start, wanted, prefix.hexdigest())
                best = self._elsewhere(*told) or best
            if best is None or not best.tokens:
                break
            found.append(best)
            if best.tokens < len(best.chunk.tokens) // 4:
                break
            parent, start, parent_key = best.chunk.row, best.chunk.stop, best.chunk.key
        return found

    def add(
        self, tenant: str, identity: str, parent: Chunk | None, ids: Sequence[int], ref: Ref
    ) -> Chunk | None:
        """Tell of a chunk whose blob is kept; None where the one that it continues is gone.

        Args:
            ids: every token of the text up to the chunk's last.
        """
        start = 0 if parent is None else parent.stop
        tokens, above = spelled(ids[start:]), "" if parent is None else parent.key
        made = Chunk(
            0,
            0 if parent is None else parent.row,
            start,
            tokens,
            self._key(tenant, identity, above, tokens),
            prefix_of(ids),
            ref,
        )
        before = prefix_of(ids[:start]) if start else ""
        # Where digests collide, other machines do without it.
        is_new = self._notes.tell(tenant, made.key, told_of(made, tenant, identity, before))
        added = self._insert(made, tenant, identity, before)
        if not is_new:
            self._notes.share(tenant, made.key)
        elif added is None:
            self._notes.remove(tenant, [made.key])
        return added

    def drop(self, chunk: Chunk, tenant: str) -> list[Chunk]:
        """Forget a chunk and all that continue it; the blobs are the caller's to delete."""
        with self._manifest.writing() as rows:
            found = rows(
                "WITH RECURSIVE below(id) AS (SELECT id FROM chunks WHERE id = ? AND key = ? "
                "UNION SELECT chunks.id FROM chunks "
                f"JOIN below ON parent = below.id) SELECT {_COLUMNS} FROM chunks "
                "WHERE id IN (SELECT id FROM below)",
                (chunk.row, chunk.key),
            )
            gone = [_chunk(row) for row in found]
            for each in gone:
                rows("DELETE FROM chunks WHERE id = ?", (each.row,))
        self._notes.remove(tenant, (each.key for each in gone))
        return gone

    def unused(self, tenant: str, refs: Iterable[Ref]) -> list[Chunk]:
        """Which chunks of these blobs no session that the index has is made of."""
        with self._manifest.reading() as rows:
            found = [
                row
                for ref in refs
                for row in rows(
                    f"SELECT {_COLUMNS} FROM chunks WHERE tenant = ? AND digest = ? AND {_UNUSED}",
                    (tenant, ref.digest),
                )
            ]
        return [_chunk(row) for row in found]

    def all_unused(self, since: float) -> dict[str, list[Chunk]]:
        """Per tenant, every chunk that no session is made of and nobody has read since then."""
        found = defaultdict[str, list[Chunk]](list)
        with self._manifest.reading() as rows:
            for tenant, *row in rows(
                f"SELECT tenant, {_COLUMNS} FROM chunks WHERE last_used <= ? AND {_UNUSED}",
                (since,),
            ):
                found[tenant].append(_chunk(row))
        return found

    def keep(self, tenant: str, identity: str, ids: Sequence[int]) -> None:
        """Have the beginning of a text stay though no session is made of it, until it is dropped.

        On other machines, too.
        """
        for each in self.longest(tenant, identity, ids):
            if each.tokens == TOKENS:
                self._notes.keep(tenant, each.chunk.key)

    def kept(self) -> dict[tuple[str, str], str]:
        """By tenant and key, blobs of all chunks that are to stay; "" where none can be told."""
        with self._manifest.reading() as rows:
            here = {(tenant, key): digest for tenant, key, digest in rows(_DIGESTS)}
        return {own: here.get(own) or self._digest(*own) for own in self._notes.kept()}

    def stays(self, chunk: Chunk, tenant: str) -> bool:
        """Whether a chunk is kept for its own sake, or another machine than its writer uses it."""
        own = tenant, chunk.key
        return self._notes.is_kept(*own) or self._notes.is_shared(*own)

    def leave(self, tenant: str, chunks: Iterable[Chunk]) -> None:
        """Forget chunks that no session is made of and none continues that stays; the blobs do."""
        gone: list[str] = []
        with self._manifest.writing() as rows:
            for chunk in sorted(chunks, key=lambda chunk: -chunk.start):
                gone += [chunk.key] if rows(_LEAVE, (chunk.row, chunk.key)) else []
        at_once(lambda key: self._notes.remove(tenant, [key]), gone)

    def used(self, shared: Sequence[Shared]) -> None:
        """Chunks were read."""
        now = self._manifest.clock()
        with self._manifest.writing() as rows:
            for each in shared:
                rows(
                    "UPDATE chunks SET last_used = ?, uses = uses + 1 WHERE id = ?",
                    (now, each.chunk.row),
                )

    def all(self) -> list[tuple[str, Chunk, float, int]]:
        """Tenant, chunk, last use and uses of every row, parents first."""
        with self._manifest.reading() as rows:
            found = rows(
                f"SELECT tenant, {_COLUMNS}, last_used, uses FROM chunks ORDER BY start, id"
            )
        return [(row[0], _chunk(row[1:9]), row[9], row[10]) for row in found]

    def rebuild(self) -> None:
        """Index what is told of beside the blobs."""
        known: dict[tuple[str, str, str], int] = {}
        for each in sorted(self._notes.all(), key=lambda told: (told["start"], told["key"])):
            own = each["tenant"], each["identity"]
            parent = known.get((*own, each["before"]), 0)
            if each["start"] and not parent:
                continue  # what it continues is lost
            made = chunk_of(each, parent)
            if (row := self._insert(made, *own, each["before"])) is not None:
                known[*own, made.prefix] = row.row

    def _nearest(self, tenant: str, identity: str, parent: int, wanted: bytes) -> Shared | None:
        """The child that shares most tokens: one of the two that stand beside the text."""
        best: Shared | None = None
        with self._manifest.reading() as rows:
            for sign, order in (("<=", "DESC"), (">", "ASC")):
                found = rows(
                    f"SELECT {_COLUMNS} FROM chunks WHERE tenant = ? AND identity = ? "
                    f"AND parent = ? AND tokens {sign} ? ORDER BY tokens {order} LIMIT 1",
                    (tenant, identity, parent, wanted),
                )
                for chunk in map(_chunk, found):
                    count = common(chunk.tokens, wanted)
                    if best is None or count > best.tokens:
                        best = Shared(chunk, count)
        return best

    def _elsewhere(
        self,
        tenant: str,
        identity: str,
        parent: int,
        parent_key: str,
        start: int,
        wanted: bytes,
        prefix: str,
    ) -> Shared | None:
        """A chunk that another machine has kept behind the same beginning."""
        told = self._notes.read(tenant, self._key(tenant, identity, parent_key, wanted))
        if told is None or told["tenant"] != tenant or told["identity"] != identity:
            return None
        chunk = chunk_of(told, parent)
        if (chunk.tokens, chunk.start, chunk.prefix) != (wanted, start, prefix):
            return None
        self._notes.share(tenant, chunk.key)
        inserted = self._insert(chunk, tenant, identity, told["before"])
        return None if inserted is None else Shared(inserted, TOKENS)

    def _insert(self, chunk: Chunk, tenant: str, identity: str, before: str) -> Chunk | None:
        """The chunk as a row; the one that is there already, with the blob that is told of now.

        None where the row of the one that it continues is gone, or another's by now.
        """
        tokens = self._sealing.masked(tenant, before, chunk.tokens)
        prefix = self._sealing.tagged(tenant, chunk.prefix)
        parent = chunk.parent, self._sealing.tagged(tenant, before) if before else ""
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
        return _chunk(row)

    def _digest(self, tenant: str, key: str) -> str:
        """Of the blob that is told of; empty where none can be told."""
        told = self._notes.read(tenant, key)
        return "" if told is None else str(told["ref"]["digest"])

    def _key(self, tenant: str, identity: str, parent: str, tokens: bytes) -> str:
        return self._sealing.tagged(tenant, chunk_key(tenant, identity, parent, tokens))


def _before(prefix: Any, start: int) -> str:
    """What stands in front of a chunk, as a digest; empty for nothing."""
    return prefix.hexdigest() if start else ""


def _chunk(row: Sequence[Any]) -> Chunk:
    return Chunk(*row[:6], Ref(*row[6:]))  # pyright: ignore[reportCallIssue]
