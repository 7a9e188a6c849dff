"""Servers whose sessions and caches outlive them, in a folder."""

from __future__ import annotations

from pathlib import Path

from larder.engine import ModelSnapshots
from larder.models import LoadedModel
from larder.server import Durability, StoreDiskTier, StoreSessionPersistence
from larder.store import FileSystem, Store, StreamController
from server_core import Served


class Stored:
    """A server over a store.

    Args:
        served: policy and budgets, as `Served` takes them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        durability: Durability = Durability.TURN,
        codec: str = "raw",
        place: FileSystem | None = None,
        streaming: StreamController = StreamController(),  # noqa: B008, frozen
        **served: object,
    ) -> None:
        url = str(folder / "blobs") if place is None else place
        self.store = Store(url, folder / "home", secret=b"s" * 32)
        self.persistence = StoreSessionPersistence(self.store, loaded.decoder.spec)
        snapshots = ModelSnapshots(self.store, loaded, codec, streaming)
        self.disk = StoreDiskTier(self.persistence, snapshots, durability)
        own = {"persistence": self.persistence, "disk": self.disk, **served}
        self.served = Served(loaded, **own)  # pyright: ignore
        self.core, self.ask, self.run = self.served.core, self.served.ask, self.served.run

    def close(self) -> None:
        self.core.close()
        self.store.close()

    def tier(self, name: str = "x", tenant: str = "a") -> str:
        """Where a session's cache is, without bringing it to memory."""
        if self.core.sessions.has(tenant, name):
            return self.core.sessions.find(tenant, name).tier
        [view] = [view for view in self.persistence.list_sessions(tenant) if view.name == name]
        return view.tier
