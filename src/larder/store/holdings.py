"""Which blobs there are, in whose name, and what needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from larder.core.errors import BudgetError, StoreError
from larder.store.blobs import Ref
from larder.store.manifest import Manifest
from larder.store.records import Record

Deleted = TypeVar("Deleted")
NEEDED = "SELECT 1 FROM spans WHERE digest = ? UNION SELECT 1 FROM chunks WHERE digest = ?"


class Holdings:
    """The manifest's word on blobs. Safe from threads and processes."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def kept(self, ref: Ref, tenant: str, now: float, room: int | None = None) -> int:
        """A blob is there, or is about to be; the bytes that are new in the tenant's account.

        Args:
            now: as in `touched`.
            room: bytes that all blobs of all processes may come to; None for any number.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._manifest.writing() as rows:
            before = self._total(rows)
            rows(
                "INSERT INTO blobs VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET written = excluded.written",
                (ref.digest, ref.bytes, tenant, now),
            )
            after = self._total(rows)
            if room is not None and after > room and after > before:
                raise BudgetError(
                    f"{ref.bytes} bytes more do not fit on the disk, where another process has "
                    "taken the room: remove sessions, or raise the budget."
                )
        return after - before

    def totals(self) -> dict[str, int]:
        """Bytes of blobs that are kept in the name of each tenant, by any process."""
        with self._manifest.reading() as rows:
            return dict(rows("SELECT tenant, bytes FROM totals"))

    def prune(self, there: Collection[str], before: float) -> None:
        """Forget blobs that are not there and were to be long ago."""
        with self._manifest.writing() as rows:
            known = rows("SELECT digest FROM blobs WHERE written <= ?", (before,))
            for (digest,) in known:
                if digest not in there:
                    rows("DELETE FROM blobs WHERE digest = ?", (digest,))

    def live(self, since: float = math.inf) -> set[str]:
        """Digests of every blob that something needs, or that somebody has put since then."""
        with self._manifest.reading() as rows:
            found = rows(
                "SELECT digest FROM spans UNION SELECT digest FROM chunks "
                "UNION SELECT digest FROM blobs WHERE written > ?",
                (since,),
            )
        return {digest for (digest,) in found}

    def release(self, refs: Iterable[Ref]) -> None:
        """Have no session need these any more, though its records name them."""
        with self._manifest.writing() as rows:
            for ref in refs:
                rows("DELETE FROM spans WHERE digest = ?", (ref.digest,))

    def has_left(self, record: Record) -> bool:
        """Whether a part of a session's state was released."""
        with self._manifest.reading() as rows:
            [(count,)] = rows(
                "SELECT count(*) FROM spans WHERE tenant = ? AND session = ? AND epoch = ?",
                (record.tenant, record.session, record.epoch),
            )
        return count < len({ref.digest for ref in record.refs})

    def needed(self, digest: str) -> bool:
        """Whether anything needs a blob."""
        with self._manifest.reading() as rows:
            return bool(rows(NEEDED, (digest, digest)))

    def touched(self, digest: str, now: float) -> None:
        """A blob that is there is about to be needed.

        One that another machine has written has no place in this index, and is given none.

        Args:
            now: by which who says it knows later whether somebody else has said so since.
        """
        with self._manifest.writing() as rows:
            rows("UPDATE blobs SET written = ? WHERE digest = ?", (now, digest))

    def given_up(
        self, digest: str, own: float, before: float, delete: Callable[[str], Deleted]
    ) -> tuple[str, int, Deleted] | None:
        """Forget a blob and delete it; in whose name it was kept, its bytes, and what that tells.

        None where that must not be: something needs it, or somebody else has put it since. Who is
        about to need it meanwhile waits, and then finds it gone: between the two it would be there.

        Args:
            own: when who asks has put it.
            before: what others have put until then is in the making no more.
            delete: given the digest; where it fails, the blob is not forgotten.
        """
        try:
            with self._manifest.writing() as rows:
                if rows(NEEDED, (digest, digest)):
                    return None
                found = rows(
                    "DELETE FROM blobs WHERE digest = ? AND (written = ? OR written <= ?) "
                    "RETURNING tenant, bytes",
                    (digest, own, before),
                )
                return (*found[0], _deleted(digest, delete)) if found else None
        except _Failed as failed:
            raise failed.error from failed

    def put_at(self, digest: str) -> float | None:
        """When a process of this machine has put a blob last; None where none has."""
        with self._manifest.reading() as rows:
            found = rows("SELECT written FROM blobs WHERE digest = ?", (digest,))
        return found[0][0] if found else None

    def put_since(self, since: float) -> set[str]:
        """Digests of blobs that processes of this machine have put since then."""
        with self._manifest.reading() as rows:
            return {
                digest for (digest,) in rows("SELECT digest FROM blobs WHERE written > ?", (since,))
            }

    def _total(self, rows: Callable[..., list[Any]]) -> int:
        [(total,)] = rows("SELECT coalesce(sum(bytes), 0) FROM totals")
        return total

    def owners(self) -> dict[str, str]:
        """In whose name each blob was kept, by digest."""
        with self._manifest.reading() as rows:
            return dict(rows("SELECT digest, tenant FROM blobs"))

    def spend(self, day: int, count: int, limit: int | None) -> int | None:
        """Count bytes written on a day; where that is too many, what was written before."""
        with self._manifest.writing() as rows:
            found = rows("SELECT bytes FROM written WHERE day = ?", (day,))
            written = found[0][0] if found else 0
            if limit is not None and written + count > limit:
                return written
            rows("DELETE FROM written WHERE day < ?", (day,))
            rows("INSERT OR REPLACE INTO written VALUES (?, ?)", (day, written + count))
        return None


class _Failed(Exception):
    """A disk's failure on its way through the index, which is not to be taken for its own."""

    def __init__(self, error: StoreError) -> None:
        self.error = error


def _deleted(digest: str, delete: Callable[[str], Deleted]) -> Deleted:
    try:
        return delete(digest)
    except StoreError as error:
        raise _Failed(error) from error
