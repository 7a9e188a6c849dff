"""Session leases among hosts that share a store.

    claims/<tenant>/<session>/<term>.json      the creator of the highest term holds the session
    holders/<holder>.json                      time until which a holder counts as alive

A lease lasts as long as its holder sends heartbeats. A holder that pauses and resumes late finds a
higher term, or its own term deleted. Clocks that differ only make a claim last longer or
shorter: what is written is decided by the epochs of the session (`larder.store.sessions.epochs`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from larder.core.errors import Damaged, Refused
from larder.store.components import StoreComponents
from larder.store.digests import (
    canonical_json,
    mac_of,
    open_sealed_json,
    parse_json,
    sealed_json,
)
from larder.store.sessions.records import SessionKey

LEASES_FOLDER, HOLDERS_FOLDER = "claims", "holders"
LEASE_SECONDS = 6.0
HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class SessionLease:
    """Exclusive right to continue a session.

    Args:
        folder: of the session's claims.
        mark: unique token of the lease.
    """

    folder: str
    term: int
    mark: str

    @property
    def path(self) -> str:
        """Path of the lease file."""
        return f"{self.folder}/{self.term}.json"


class LeaseConflict(Refused):
    """Error: another host holds the lease of the session.

    Args:
        seconds: after which the other counts as dead, unless it says that it is alive.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The session is answering elsewhere, or was {seconds:.1f} s ago: ask again.", "claim"
        )
        self.seconds = seconds


class SessionLeases:
    """Leases of one process. Safe from threads, processes and machines.

    Args:
        alive_seconds: for which a holder counts as alive after it has said so.
    """

    def __init__(self, parts: StoreComponents, alive_seconds: float = LEASE_SECONDS) -> None:
        self._parts, self._alive_seconds = parts, alive_seconds
        self._holder = secrets.token_hex(32)
        self._alive_until = 0.0

    def heartbeat(self) -> None:
        """Renew all leases of this process.

        Raises:
            StoreError: it cannot be said.
        """
        until = self._parts.clock() + self._alive_seconds
        path = self._beside(self._holder)
        self._call(self._parts.place.replace, path, self._sealed(path, {"until": until}))
        self._alive_until = until

    def take(self, principal: str, name: str) -> SessionLease:
        """Acquire the lease of a session.

        Raises:
            LeaseConflict: another host holds it.
            StoreError: nothing can be written.
        """
        if self._alive_until <= self._parts.clock():
            self.heartbeat()
        tenant = self._parts.tenant(principal)
        folder = f"{LEASES_FOLDER}/{tenant}/{SessionKey.named(tenant, name).session}"
        terms = self._terms(folder)
        for term in terms:
            self._check(f"{folder}/{term}.json")
        claim = SessionLease(folder, max(terms, default=0) + 1, secrets.token_hex(16))
        told = self._sealed(claim.path, {"holder": self._holder, "mark": claim.mark})
        try:
            self._call(self._parts.place.create, claim.path, told)
        except FileExistsError as error:
            raise LeaseConflict(self._alive_seconds) from error
        for term in terms:
            self._call(self._parts.place.remove, f"{folder}/{term}.json")
        return claim

    def holds(self, claim: SessionLease) -> bool:
        """True if no other host has acquired the lease since.

        Raises:
            StoreError: that cannot be told.
        """
        if max(self._terms(claim.folder), default=0) != claim.term:
            return False
        return self._read(claim.path).get("mark") == claim.mark

    def release(self, claim: SessionLease) -> None:
        """Release a lease.

        Raises:
            StoreError: it cannot be said; the claim ends with this process.
        """
        if self._read(claim.path).get("mark") == claim.mark:
            self._call(self._parts.place.remove, claim.path)

    def sweep(self) -> int:
        """Delete files of processes that ended without releasing; return the number deleted."""
        parts = self._parts
        before = parts.clock() - STALE_SECONDS
        old = [
            entry.path
            for folder in (HOLDERS_FOLDER, LEASES_FOLDER)
            for entry in self._call(lambda folder=folder: list(parts.place.list_files(folder)))
            if entry.modified < before and not self._is_alive(entry.path)
        ]
        for path in old:
            self._call(parts.place.remove, path)
        return len(old)

    def _is_alive(self, path: str) -> bool:
        """True if a holder's heartbeat has not expired."""
        told = self._read(path)
        if "holder" in told:
            told = self._read(self._beside(str(told["holder"])))
        return float(told.get("until", 0.0)) > self._parts.clock()

    def close(self) -> None:
        """Release all leases and end the heartbeat of this process.

        Raises:
            StoreError: it cannot be said.
        """
        self._call(self._parts.place.remove, self._beside(self._holder))
        self._alive_until = 0.0

    def _check(self, path: str) -> None:
        """Check that no other live process holds a lease. Raises: LeaseConflict."""
        holder = str(self._read(path).get("holder", ""))
        if holder == self._holder:
            return
        until = self._read(self._beside(holder)).get("until", 0.0)
        left = min(float(until) - self._parts.clock(), self._alive_seconds)
        if left > 0:
            raise LeaseConflict(left)

    def _terms(self, folder: str) -> list[int]:
        found = self._call(lambda: [entry.path for entry in self._parts.place.list_files(folder)])
        words = (path.rpartition("/")[2].removesuffix(".json") for path in found)
        return sorted(int(word) for word in words if word.isascii() and word.isdecimal())

    def _sealed(self, path: str, fields: Mapping[str, Any]) -> bytes:
        return sealed_json(self._parts.secret, "told", canonical_json(fields), path)

    def _read(self, path: str) -> dict[str, Any]:
        """Content of a file; empty if it is missing or damaged."""
        try:
            data = self._call(self._parts.place.read, path)
            return parse_json(open_sealed_json(self._parts.secret, "told", data, path))
        except (FileNotFoundError, Damaged):
            return {}

    def _call(self, function: Any, *args: Any) -> Any:
        return self._parts.executor.call(function, *args)

    def _beside(self, holder: str) -> str:
        return f"{HOLDERS_FOLDER}/{mac_of(self._parts.secret, holder)}.json"
