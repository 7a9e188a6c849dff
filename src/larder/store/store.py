"""The store: what is kept outside the process, for tenants, verified when it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from larder.store.exporting import Exchange
from larder.store.parts import Parts
from larder.store.places import Place
from larder.store.prefixes import Prefixes
from larder.store.sessions import Sessions
from larder.store.turns import Turns
from larder.store.upkeep import Upkeep


class Store:
    """Sessions and beginnings of texts. Safe from threads and processes.

    Args:
        url, home, options: as `Parts` takes them.
    """

    def __init__(self, url: str | Place, home: Path, **options: Any) -> None:
        self.parts = Parts(url, home, **options)
        self.sessions = Sessions(self.parts)
        self.turns = Turns(self.parts)
        self.prefixes = Prefixes(self.parts)
        self.upkeep = Upkeep(self.parts)
        self.exchange = Exchange(self.parts)

    def close(self) -> None:
        """Give the index back."""
        self.parts.close()
