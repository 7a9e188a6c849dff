"""Where the caches of one conversation live: one active on the device, the others parked.

A parked cache is in host memory without slack. Exactly one of the two holds a cache at any time;
a switch writes the active one back first, with all that was appended to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.spec import ModelSpec


@dataclass(frozen=True)
class Parked:
    """A cache at rest in host memory."""

    state: Mapping[str, Tensor]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.state.values())


class Shelf:
    """The caches of a conversation, by number. Not safe for two threads at once."""

    def __init__(self, spec: ModelSpec, caches: Iterable[SequenceCache]) -> None:
        self._spec = spec
        self._parked: dict[int, Parked] = {}
        self._active: tuple[int, SequenceCache] | None = None
        self._count = 0
        for cache in caches:
            self.add(cache)

    def __len__(self) -> int:
        return self._count

    def add(self, cache: SequenceCache) -> int:
        """Park one more cache; returns its number."""
        self._parked[self._count] = _park(cache)
        self._count += 1
        return self._count - 1

    def activate(self, number: int) -> SequenceCache:
        """The cache of that number, on the device; the one that was active is written back."""
        if self._active is not None:
            active, cache = self._active
            if active == number:
                return cache
            self._parked[active] = _park(cache)
            self._active = None
        restored = _restore(self._spec, self._parked[number])
        del self._parked[number]
        self._active = (number, restored)
        return restored

    def replace(self, number: int, cache: SequenceCache) -> None:
        """Put a rebuilt cache in the place of an old one."""
        if self._active is not None and self._active[0] == number:
            self._active = (number, cache)
        else:
            self._parked[number] = _park(cache)

    @property
    def active(self) -> int | None:
        """The number of the active cache."""
        return None if self._active is None else self._active[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, active and parked."""
        return self.parked_bytes + (0 if self._active is None else self._active[1].nbytes)

    @property
    def parked_bytes(self) -> int:
        """Bytes of the parked caches alone."""
        return sum(parked.nbytes for parked in self._parked.values())

    def bytes_of(self, number: int) -> int:
        """Bytes of one cache."""
        if self._active is not None and self._active[0] == number:
            return self._active[1].nbytes
        return self._parked[number].nbytes


def _park(cache: SequenceCache) -> Parked:
    cache.compact()
    host = torch.device("cpu")
    state = {name: tensor.to(host) for name, tensor in cache.state().items()}
    return Parked(state, cache.meta())


def _restore(spec: ModelSpec, parked: Parked) -> SequenceCache:
    state = {name: tensor.to(_place(spec, name)) for name, tensor in parked.state.items()}
    return SequenceCache.restore(spec, state, parked.meta)


def _place(spec: ModelSpec, name: str) -> torch.device:
    """Lengths stay on the host; everything else goes to the device."""
    return torch.device("cpu") if name.endswith(".lengths") else spec.device
