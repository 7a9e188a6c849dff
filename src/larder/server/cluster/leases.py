"""Session leases: sessions of a store that several hosts share.

    claims/<tenant>/<session>/<term>.json      the creator of the highest term holds the session
    holders/<holder>.json                      time until which a holder counts as alive

Epochs prevent two hosts from both writing a session. Leases prevent both from working on it, and a
host that was declared dead from writing when it wakes up: it finds a higher term, or its own term
deleted. A lease lasts as long as its holder sends heartbeats; clocks that differ only make it last
longer or shorter.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from larder.core.errors import Damaged, Refused, StoreError
from larder.server.api_errors import session_held, session_superseded
from larder.server.cluster.epoch_fence import EpochFence
from larder.server.persistence.base import SessionLocks
from larder.server.session_state import SessionState
from larder.store.components import StoreComponents
from larder.store.digests import canonical_json, mac_of, open_sealed_json, parse_json, sealed_json
from larder.store.sessions.records import SessionKey
from larder.store.store import Store

LOG = logging.getLogger(__name__)
LEASES_FOLDER, HOLDERS_FOLDER = "claims", "holders"
LEASE_SECONDS = 6.0
HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class SessionLease:
    """Exclusive right to continue a session.

    Args:
        folder: of the session's lease files.
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
        seconds: after which the other host counts as dead without a heartbeat.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The session is answering elsewhere, or was {seconds:.1f} s ago: ask again.", "claim"
        )
        self.seconds = seconds


class SessionLeases:
    """Leases of one process. Safe from threads, processes and machines.

    Args:
        alive_seconds: how long a holder counts as alive after a heartbeat.
    """

    def __init__(self, parts: StoreComponents, alive_seconds: float = LEASE_SECONDS) -> None:
        self._parts, self._alive_seconds = parts, alive_seconds
        self._holder = secrets.token_hex(32)
        self._alive_until = 0.0

    def heartbeat(self) -> None:
        """Renew all leases of this process.

        Raises:
            StoreError: the store cannot be written.
        """
        until = self._parts.clock() + self._alive_seconds
        path = self._holder_path(self._holder)
        self._call(self._parts.file_system.replace, path, self._sealed(path, {"until": until}))
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
        lease = SessionLease(folder, max(terms, default=0) + 1, secrets.token_hex(16))
        data = self._sealed(lease.path, {"holder": self._holder, "mark": lease.mark})
        try:
            self._call(self._parts.file_system.create, lease.path, data)
        except FileExistsError as error:
            raise LeaseConflict(self._alive_seconds) from error
        for term in terms:
            self._call(self._parts.file_system.remove, f"{folder}/{term}.json")
        return lease

    def holds(self, lease: SessionLease) -> bool:
        """True if no other host has acquired the lease since.

        Raises:
            StoreError: the store cannot be read.
        """
        if max(self._terms(lease.folder), default=0) != lease.term:
            return False
        return self._read(lease.path).get("mark") == lease.mark

    def release(self, lease: SessionLease) -> None:
        """Release a lease.

        Raises:
            StoreError: the store cannot be written; the lease ends with this process.
        """
        if self._read(lease.path).get("mark") == lease.mark:
            self._call(self._parts.file_system.remove, lease.path)

    def sweep(self) -> int:
        """Delete files of processes that ended without releasing; return the number deleted."""
        parts = self._parts
        before = parts.clock() - STALE_SECONDS
        old = [
            entry.path
            for folder in (HOLDERS_FOLDER, LEASES_FOLDER)
            for entry in self._call(
                lambda folder=folder: list(parts.file_system.list_files(folder))
            )
            if entry.modified < before and not self._is_alive(entry.path)
        ]
        for path in old:
            self._call(parts.file_system.remove, path)
        return len(old)

    def _is_alive(self, path: str) -> bool:
        """True if a holder's heartbeat has not expired."""
        fields = self._read(path)
        if "holder" in fields:
            fields = self._read(self._holder_path(str(fields["holder"])))
        return float(fields.get("until", 0.0)) > self._parts.clock()

    def close(self) -> None:
        """Release all leases and end the heartbeat of this process.

        Raises:
            StoreError: the store cannot be written.
        """
        self._call(self._parts.file_system.remove, self._holder_path(self._holder))
        self._alive_until = 0.0

    def _check(self, path: str) -> None:
        """Check that no other live process holds a lease.

        Raises:
            LeaseConflict: one does.
        """
        holder = str(self._read(path).get("holder", ""))
        if holder == self._holder:
            return
        until = self._read(self._holder_path(holder)).get("until", 0.0)
        left = min(float(until) - self._parts.clock(), self._alive_seconds)
        if left > 0:
            raise LeaseConflict(left)

    def _terms(self, folder: str) -> list[int]:
        found = self._call(
            lambda: [entry.path for entry in self._parts.file_system.list_files(folder)]
        )
        words = (path.rpartition("/")[2].removesuffix(".json") for path in found)
        return sorted(int(word) for word in words if word.isascii() and word.isdecimal())

    def _sealed(self, path: str, fields: Mapping[str, Any]) -> bytes:
        return sealed_json(self._parts.secret, "told", canonical_json(fields), path)

    def _read(self, path: str) -> dict[str, Any]:
        """Content of a file; empty if it is missing or damaged."""
        try:
            data = self._call(self._parts.file_system.read, path)
            return parse_json(open_sealed_json(self._parts.secret, "told", data, path))
        except (FileNotFoundError, Damaged):
            return {}

    def _call(self, function: Any, *args: Any) -> Any:
        return self._parts.executor.call(function, *args)

    def _holder_path(self, holder: str) -> str:
        return f"{HOLDERS_FOLDER}/{mac_of(self._parts.secret, holder)}.json"


class LeasedSessionLocks(SessionLocks):
    """Leases as locks on sessions while they answer. For the model's thread.

    If the store fails, answers continue, and epochs alone decide which server's write counts.
    """

    def __init__(self, store: Store, leases: SessionLeases) -> None:
        self._leases, self._fence = leases, EpochFence(store)
        self._active: dict[int, SessionLease] = {}

    def acquire(self, session: SessionState) -> None:
        try:
            with _logged_store_errors():
                self._active[session.key] = self._leases.take(session.tenant, session.name)
        except LeaseConflict as error:
            raise session_held(session.name, error.seconds) from error

    def check(self, session: SessionState) -> None:
        lease, is_lost = self._active.get(session.key), False
        with _logged_store_errors():
            is_lost = lease is not None and not self._leases.holds(lease)
        if is_lost:
            session.durability.is_superseded = True
            raise session_superseded(session.name)

    def release(self, session: SessionState) -> None:
        lease = self._active.pop(session.key, None)
        if lease is not None:
            with _logged_store_errors():
                self._leases.release(lease)

    def is_outdated(self, session: SessionState) -> bool:
        if not session.durability.pending_writes:  # else this server is writing the newest state
            with _logged_store_errors():
                return self._fence.is_outdated(session)
        return False


@contextmanager
def _logged_store_errors() -> Iterator[None]:
    """Context in which errors of the store are logged and suppressed, other than a conflict."""
    try:
        yield
    except LeaseConflict:
        raise
    except StoreError as error:
        LOG.warning("Shared session store: %s", error)


class LeaseHeartbeat:
    """Thread that renews a server's leases until it is closed."""

    def __init__(self, leases: SessionLeases) -> None:
        self._leases = leases
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat and release all leases at once."""
        self._is_closing.set()
        self._thread.join()
        with _logged_store_errors():
            self._leases.close()

    def _run(self) -> None:
        with _logged_store_errors():
            self._leases.sweep()
        while not self._is_closing.wait(HEARTBEAT_SECONDS):
            with _logged_store_errors():
                self._leases.heartbeat()
