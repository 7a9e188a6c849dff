"""Which blobs there are, in whose name, and what needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from larder.core.errors import BudgetError
from larder.store.blobs import Ref
from larder.store.manifest import Manifest
from larder.store.records import Record


class Holdings:
    """The manifest's word on blobs. Safe from threads and processes."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def kept(self, ref: Ref, tenant: str, room: int | None = None) -> int:
        """A blob is there, or is about to be; the bytes that are new in the tenant's account.

        Args:
            room: bytes that all blobs of all processes may come to; None for any number.

        Raises:
            BudgetError: others have taken the room meanwhile; nothing has changed.
        """
        with self._manifest.writing() as rows:
            before = self._total(rows)
            rows(
                "INSERT INTO blobs VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET written = excluded.written",
                (ref.digest, ref.bytes, tenant, self._manifest.clock()),
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

    def live(self) -> set[str]:
        """Digests of every blob that something needs."""
        with self._manifest.reading() as rows:
            found = rows("SELECT digest FROM spans UNION SELECT digest FROM chunks")
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
            return bool(
                rows(
                    "SELECT 1 FROM spans WHERE digest = ? UNION SELECT 1 FROM chunks "
                    "WHERE digest = ?",
                    (digest, digest),
                )
            )

    def gone(self, digest: str) -> int:
        """A blob was deleted; the bytes that leave its tenant's account."""
        with self._manifest.writing() as rows:
            found = rows("DELETE FROM blobs WHERE digest = ? RETURNING bytes", (digest,))
        return found[0][0] if found else 0

    def whose(self, digest: str) -> tuple[str, float]:
        """In whose name a blob was kept, and when; nobody's and never where it was not."""
        with self._manifest.reading() as rows:
            found = rows("SELECT tenant, written FROM blobs WHERE digest = ?", (digest,))
        return found[0] if found else ("", 0.0)

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
