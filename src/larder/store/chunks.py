"""Which beginnings of texts are kept, found token by token.

    chunks/<tenant>/<key>.json     beside the blobs: what the index can be built again from

A chunk holds keys and values of `TOKENS` tokens behind one known beginning. Chunks of one tenant
and one identity form a tree; children of a chunk are ordered by their tokens, so the one that
shares most with a text stands next to where the text would be. A chunk belongs to its parent's
row, which was itself chosen by its tokens: no digest decides what follows what, so two texts whose
digests collide are still two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from larder.core.errors import Damaged, Refused
from larder.store.blobs import Ref
from larder.store.container import canonical, parsed
from larder.store.deadline import Guard
from larder.store.digests import same, seal_of
from larder.store.manifest import Manifest
from larder.store.places import Place
from larder.store.sealing import Sealing, Unsealed
from larder.store.wording import chunk_key, common, ids_of, prefix_of, spelled

FOLDER = "chunks"
SCHEMA = 1
TOKENS = 256
_COLUMNS = "id, parent, start, tokens, key, prefix, digest, bytes"


@dataclass(frozen=True)
class Chunk:
    """Keys and values of some tokens behind one beginning.

    Args:
        row: of the manifest.
        parent: the row of the chunk that it continues; 0 for none.
        start: true position of the first token.
        tokens: as `spelled` spells them; masked, where the store is under a key.
        key: what it is called beside the blobs.
        prefix: digest of every token from the first of the text to the last of the chunk; tagged,
            where the store is under a key.
        ref: of its blob.
    """

    row: int
    parent: int
    start: int
    tokens: bytes
    key: str
    prefix: str
    ref: Ref

    @property
    def stop(self) -> int:
        """True position behind its last token."""
        return self.start + len(self.tokens) // 4


@dataclass(frozen=True)
class Shared:
    """A chunk, and how many of its tokens a text shares."""

    chunk: Chunk
    tokens: int


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
        self._manifest, self._place, self._guard = manifest, place, guard
        self._secret, self._sealing = secret, sealing

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
    ) -> Chunk:
        """Tell of a chunk whose blob is kept.

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
        told = self._told(made, tenant, identity, before)
        try:
            self._guard.call(self._place.create, path_of(tenant, made.key), told)
        except FileExistsError:
            pass  # told of before; or digests collide, and then other machines do without it
        return self._insert(made, tenant, identity, before)

    def drop(self, chunk: Chunk, tenant: str) -> list[Chunk]:
        """Forget a chunk and all that continue it; the blobs are the caller's to delete."""
        with self._manifest.writing() as rows:
            found = rows(
                "WITH RECURSIVE below(id) AS (SELECT ? UNION SELECT chunks.id FROM chunks "
                f"JOIN below ON parent = below.id) SELECT {_COLUMNS} FROM chunks "
                "WHERE id IN (SELECT id FROM below)",
                (chunk.row,),
            )
            gone = [_chunk(row) for row in found]
            for each in gone:
                rows("DELETE FROM chunks WHERE id = ?", (each.row,))
        for each in gone:
            self._guard.call(self._place.remove, path_of(tenant, each.key))
        return gone

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
        told = [self._read(path) for path in self._guard.call(self._paths)]
        known: dict[tuple[str, str, str], int] = {}
        for each in sorted((t for t in told if t), key=lambda t: (t["start"], t["key"])):
            own = each["tenant"], each["identity"]
            parent = known.get((*own, each["before"]), 0)
            if each["start"] and not parent:
                continue  # what it continues is lost
            made = _told_chunk(each, parent)
            known[*own, made.prefix] = self._insert(made, *own, each["before"]).row

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
        told = self._read(path_of(tenant, self._key(tenant, identity, parent_key, wanted)))
        if told is None or told["tenant"] != tenant or told["identity"] != identity:
            return None
        chunk = _told_chunk(told, parent)
        if (chunk.tokens, chunk.start, chunk.prefix) != (wanted, start, prefix):
            return None
        return Shared(self._insert(chunk, tenant, identity, told["before"]), TOKENS)

    def _insert(self, chunk: Chunk, tenant: str, identity: str, before: str) -> Chunk:
        """The chunk as a row; the one that is there already, with the blob that is told of now."""
        tokens = self._sealing.masked(tenant, before, chunk.tokens)
        prefix = self._sealing.tagged(tenant, chunk.prefix)
        with self._manifest.writing() as rows:
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

    def _key(self, tenant: str, identity: str, parent: str, tokens: bytes) -> str:
        return self._sealing.tagged(tenant, chunk_key(tenant, identity, parent, tokens))

    def _told(self, chunk: Chunk, tenant: str, identity: str, before: str) -> bytes:
        told = asdict(chunk) | {"tokens": ids_of(chunk.tokens), "before": before}
        told |= {"tenant": tenant, "identity": identity, "schema": SCHEMA}
        text = canonical({name: told[name] for name in told if name not in ("row", "parent")})
        return canonical({"chunk": text, "seal": seal_of(self._secret, text)}).encode()

    def _read(self, path: str) -> dict[str, Any] | None:
        """What is told of a chunk; None where nothing is, or it is not what was written."""
        try:
            outer = parsed(self._guard.call(self._place.read, path))
            if not same(seal_of(self._secret, outer["chunk"]), outer["seal"]):
                return None
            told = parsed(outer["chunk"])
        except (FileNotFoundError, Damaged, Refused, KeyError, TypeError):
            return None
        return told if told.get("schema") == SCHEMA else None

    def _paths(self) -> list[str]:
        return [entry.path for entry in self._place.listing(FOLDER)]


def _before(prefix: Any, start: int) -> str:
    """What stands in front of a chunk, as a digest; empty for nothing."""
    return prefix.hexdigest() if start else ""


def path_of(tenant: str, key: str) -> str:
    """Where a chunk is told of."""
    return f"{FOLDER}/{tenant}/{key}.json"


def _chunk(row: Sequence[Any]) -> Chunk:
    return Chunk(*row[:6], Ref(*row[6:]))  # pyright: ignore[reportCallIssue]


def _told_chunk(told: dict[str, Any], parent: int) -> Chunk:
    return Chunk(
        0,
        parent,
        told["start"],
        spelled(told["tokens"]),
        told["key"],
        told["prefix"],
        Ref(**told["ref"]),
    )
