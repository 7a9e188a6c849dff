"""Who may write a session for a while: a lease with a number that only grows.

Whoever had the lease before and wakes up late finds a higher number, and writes nothing. Leases
hold between the processes of one machine; between machines an epoch's file, created once, decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from larder.core.errors import Refused, Superseded
from larder.store.manifest import Manifest


@dataclass(frozen=True)
class Lease:
    """The right to write a session.

    Args:
        holder: who has it; no two processes go by one name.
        term: grows with every holder.
        until: seconds since 1970; afterwards anybody may take it.
    """

    tenant: str
    session: str
    holder: str
    term: int
    until: float


def acquire(manifest: Manifest, tenant: str, session: str, holder: str, seconds: float) -> Lease:
    """Take a session's lease, or prolong one's own.

    Raises:
        Refused: somebody else has it.
    """
    own, now = (tenant, session), manifest.clock()
    with manifest.writing() as rows:
        found = rows("SELECT holder, term, until FROM leases WHERE tenant=? AND session=?", own)
        term = 1
        if found:
            [(other, term, until)] = found
            if other != holder and until > now:
                raise Refused(
                    f"The session is written by {other} for {until - now:.1f} s more: wait, or "
                    "send the request there.",
                    "lease",
                )
            term += other != holder or until <= now
        lease = Lease(tenant, session, holder, term, now + seconds)
        told = (*own, holder, term, lease.until)
        rows("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", told)
    return lease


def release(manifest: Manifest, lease: Lease) -> None:
    """Give a lease back; nothing happens where somebody else has it by now."""
    with manifest.writing() as rows:
        rows(
            "UPDATE leases SET until = 0 "
            "WHERE tenant = ? AND session = ? AND holder = ? AND term = ?",
            (lease.tenant, lease.session, lease.holder, lease.term),
        )


def fence(lease: Lease | None) -> Callable[[Any], None]:
    """What a commit has to see to: nobody else has had the lease since; without one, nobody has it.

    Raises:
        Superseded: somebody has.
    """

    def check(rows: Any) -> None:
        if lease is None:
            return
        own = lease.tenant, lease.session
        found = rows("SELECT holder, term FROM leases WHERE tenant = ? AND session = ?", own)
        if found != [(lease.holder, lease.term)]:
            raise Superseded(
                f"{lease.holder} does not have the session's lease any more: load the session "
                "again, and repeat what was to be saved."
            )

    return check
