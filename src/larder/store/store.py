"""Persistent store of sessions and prefixes, by tenant, verified when read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from larder.store.components import StoreComponents
from larder.store.fs.base import FileSystem
from larder.store.maintenance import StoreMaintenance
from larder.store.prefix.prefix_store import PrefixStore
from larder.store.sessions.session_store import SessionStore


class Store:
    """Persistent store of sessions and prefixes. Safe from threads and processes.

    Args:
        url, home, options: as `StoreComponents` takes them.
    """

    def __init__(self, url: str | FileSystem, home: Path, **options: Any) -> None:
        self.parts = StoreComponents(url, home, **options)
        self.sessions = SessionStore(self.parts)
        self.prefixes = PrefixStore(self.parts)
        self.maintenance = StoreMaintenance(self.parts)

    def close(self) -> None:
        """Close the index."""
        self.parts.close()
