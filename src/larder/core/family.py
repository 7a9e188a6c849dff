"""Families of parts: the file name is the public name.

A family is a package whose modules each define one `Part`. Listing names imports nothing; loading
imports one module. Third parties add parts through the entry point group `larder.<kind>`; a name
of ours cannot be taken over.
"""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, distributions, entry_points

from larder.core.errors import UnknownName

_OURS = ("larder.", "larder_bench.")  # prefixes of the modules of our own parts
_GROUPS = "larder."  # prefix of the entry point groups for parts of others


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
        return sorted(self.own() | self._offered().keys())

    def own(self) -> frozenset[str]:
        """The names of our own parts alone, which is quick: no package's metadata is read."""
        return _own_names(self.package)

    def load(self, name: str) -> type:
        """Import one part, and only that one.

        Raises:
            UnknownName: no such part; the message lists the known ones and the nearest.
        """
        if name in self.own():
            return import_module(f"{self.package}.{name}").Part
        if name in (offered := self._offered()):
            return offered[name].load()
        raise UnknownName(unknown_name_message(self.kind, name, self.names(), LISTING))

    def _offered(self) -> dict[str, EntryPoint]:
        own = self.own()
        return {
            point.name: point
            for point in _entry_points(f"larder.{self.kind}", tuple(sys.path))
            if point.name not in own
        }


@cache  # a stranger's is looked for in the metadata of every package installed
def public_name(part: type) -> str:
    """The name that a part is written with.

    Ours have their file's, a third party's the name of its entry point. A part that nobody offers
    goes by its class.
    """
    module = part.__module__
    if module.startswith(_OURS):
        return module.rpartition(".")[2]
    top = module.partition(".")[0]
    taken = _reserved_names(part)
    for point in (point for each in distributions() for point in each.entry_points):
        is_near = point.group.startswith(_GROUPS) and point.module.partition(".")[0] == top
        if is_near and point.name not in taken and point.load() is part:
            return point.name
    return part.__name__


def _reserved_names(part: type) -> frozenset[str]:
    """Names of our own parts of the family that a third party's part belongs to."""
    for base in part.__mro__:
        if base.__module__.startswith(_OURS):
            return _own_names(base.__module__.rpartition(".")[0])
    return frozenset()


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """What packages on this path offer, read once: every package's metadata is opened for it."""
    return tuple(entry_points(group=group))


@cache
def _own_names(package: str) -> frozenset[str]:
    """Listed once: what is installed of ours stays as it is."""
    modules = {module.name for module in pkgutil.iter_modules(import_module(package).__path__)}
    return frozenset(m for m in modules if not m.startswith("_") and m != "base")


LISTED = 12  # names that an error lists; of more, the nearest
NEAREST = 3
LISTING = "`larder policy list`"


def unknown_name_message(kind: str, name: str, known: list[str], listing: str = "") -> str:
    """The sentence for a name that nobody has.

    Args:
        kind: of what is named.
        known: all names. Up to a dozen are listed; of more, the three nearest.
        listing: the command that prints them, where they are many.
    """
    if len(known) > LISTED:
        near = sorted(known, key=lambda other: (-_similarity(name, other), other))[:NEAREST]
        *first, last = map(repr, near)
        hint = f" {listing} prints all {len(known)}." if listing else ""
        return f"No {kind} named {name!r}. Did you mean {', '.join(first)} or {last}?{hint}"
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"No {kind} named {name!r}.{hint} Known: {', '.join(known)}."


def _similarity(name: str, other: str) -> float:
    """Above 1 where one name holds the other, else the share of letters in common."""
    ours, theirs = (text.lower().replace("-", "_") for text in (name, other))
    common = SequenceMatcher(None, ours, theirs).ratio()
    return common + (len(ours) > 2 and (ours in theirs or theirs in ours))
