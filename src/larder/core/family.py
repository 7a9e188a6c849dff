"""Families of parts: the file name is the public name.

A family is a package whose modules each define one `Part`. Listing names imports nothing; loading
imports one module. Third parties add parts through the entry point group `larder.<kind>`; a name
of ours cannot be taken over.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from larder.core.errors import UnknownName


@dataclass(frozen=True)
class Family:
    """All parts of one kind.

    Args:
        kind: what a part of it is called, as in "scorer".
        package: dotted name of the package that holds our own parts.
    """

    kind: str
    package: str

    def names(self) -> list[str]:
        """Every public name, sorted; nothing is imported but the package itself."""
        return sorted(self._own() | self._offered().keys())

    def load(self, name: str) -> type:
        """Import one part, and only that one.

        Raises:
            UnknownName: no such part; the message lists the known ones and the nearest.
        """
        if name in self._own():
            return import_module(f"{self.package}.{name}").Part
        if name in (offered := self._offered()):
            return offered[name].load()
        raise UnknownName(unknown(self.kind, name, self.names()))

    def _own(self) -> set[str]:
        paths = import_module(self.package).__path__
        modules = {module.name for module in pkgutil.iter_modules(paths)}
        return {name for name in modules if not name.startswith("_") and name != "base"}

    def _offered(self) -> dict[str, EntryPoint]:
        own = self._own()
        return {
            point.name: point
            for point in entry_points(group=f"larder.{self.kind}")
            if point.name not in own
        }


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The sentence for a name that nobody has: the nearest one, then all of them."""
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"No {kind} named {name!r}.{hint} Known: {', '.join(known)}."
