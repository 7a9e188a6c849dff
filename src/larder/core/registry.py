"""Registry of part families, in which a file name is the public name of a part.

A family is a package whose modules each define one `Part`. Variants of a part may stand in its
file: `VARIANTS` of the package maps the name of each to its module and class. Listing names imports
nothing; loading imports one module. Third parties add parts through the entry point group
`larder.<kind>`; they cannot override a built-in name.
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

_BUILT_IN = ("larder.", "larder_bench.")  # module prefixes of built-in parts
_GROUPS = "larder."  # prefix of the entry point groups for third-party parts
LISTED = 12  # names that an error lists; of more, the nearest
NEAREST = 3
LISTING = "`larder policy list`"


@dataclass(frozen=True)
class Family:
    """Parts of one kind.

    Args:
        kind: name of the kind, such as "scorer".
        package: dotted name of the package with the built-in parts.
        listing: command that prints all names.
    """

    kind: str
    package: str
    listing: str = ""

    def names(self) -> list[str]:
        """All public names, sorted; imports the package but no part."""
        return sorted(self.builtin_names() | self._offered().keys())

    def builtin_names(self) -> frozenset[str]:
        """Names of the built-in parts; quick, since no package metadata is read."""
        return _own_names(self.package)

    def __contains__(self, name: str) -> bool:
        return name in self.builtin_names() or name in self._offered()

    def load(self, name: str) -> type:
        """Class of one part; imports its module only.

        Raises:
            UnknownName: no part has this name; the message lists the nearest ones.
        """
        if name in self.builtin_names():
            module, part = _variants(self.package).get(name, (name, "Part"))
            return getattr(import_module(f"{self.package}.{module}"), part)
        if name in (offered := self._offered()):
            return offered[name].load()
        raise UnknownName(unknown_name_message(self.kind, name, self.names(), self.listing))

    def _offered(self) -> dict[str, EntryPoint]:
        builtin = self.builtin_names()
        return {
            point.name: point
            for point in _entry_points(f"larder.{self.kind}", tuple(sys.path))
            if point.name not in builtin
        }


@cache  # a third-party part is looked up in the metadata of every installed package
def public_name(part: type) -> str:
    """Public name of a part class.

    Built-in parts have the name of their file or variant, third-party parts that of their entry
    point; a part without an entry point has its class name.
    """
    module = part.__module__
    if module.startswith(_BUILT_IN):
        package, _, file = module.rpartition(".")
        variants = {place: name for name, place in _variants(package).items()}
        return variants.get((file, part.__name__), file)
    top = module.partition(".")[0]
    taken = _reserved_names(part)
    for point in (point for each in distributions() for point in each.entry_points):
        is_near = point.group.startswith(_GROUPS) and point.module.partition(".")[0] == top
        if is_near and point.name not in taken and point.load() is part:
            return point.name
    return part.__name__


def _reserved_names(part: type) -> frozenset[str]:
    """Built-in names of the family that a third-party part belongs to."""
    for base in part.__mro__:
        if base.__module__.startswith(_BUILT_IN):
            return _own_names(base.__module__.rpartition(".")[0])
    return frozenset()


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of a group on this path, cached: the lookup opens every package's metadata."""
    return tuple(entry_points(group=group))


@cache
def _own_names(package: str) -> frozenset[str]:
    """Names of a package's parts, cached: the installed package does not change."""
    modules = {module.name for module in pkgutil.iter_modules(import_module(package).__path__)}
    files = frozenset(m for m in modules if not m.startswith("_") and m != "base")
    return files.union(_variants(package))


def _variants(package: str) -> dict[str, tuple[str, str]]:
    """Module and class of each part that stands in the file of another, by public name."""
    return vars(import_module(package)).get("VARIANTS", {})


def unknown_name_message(kind: str, name: str, known_names: list[str], listing: str = "") -> str:
    """Error message for an unknown name.

    Args:
        kind: kind of the named thing.
        known_names: all names. Up to a dozen are listed; of more, the three nearest.
        listing: command that prints all names, where there are many.
    """
    if len(known_names) > LISTED:
        near = sorted(known_names, key=lambda other: (-_similarity(name, other), other))[:NEAREST]
        *first, last = map(repr, near)
        hint = f" {listing} prints all {len(known_names)}." if listing else ""
        return f"No {kind} named {name!r}. Did you mean {', '.join(first)} or {last}?{hint}"
    near = get_close_matches(name, known_names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"No {kind} named {name!r}.{hint} Known: {', '.join(known_names)}."


def _similarity(name: str, other: str) -> float:
    """Similarity of two names: above 1 where one contains the other, else their matching ratio."""
    ours, theirs = (text.lower().replace("-", "_") for text in (name, other))
    common = SequenceMatcher(None, ours, theirs).ratio()
    return common + (len(ours) > 2 and (ours in theirs or theirs in ours))
