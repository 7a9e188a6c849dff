"""Memory usage of layers and sequences, counted when storage is taken or freed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from threading import Lock
from typing import ClassVar, TypeVar
from weakref import WeakSet

from torch import Tensor

Owner = TypeVar("Owner", bound="TensorOwner")


class MemoryUsage:
    """Bytes and entries in use; a usage that joined a total passes its changes on to it.

    A total may be shared between threads, as pages of one layer are prefetched while another layer
    appends; each usage is changed by one thread at a time.

    Attributes:
        nbytes: bytes of all tensors.
        device_nbytes: bytes among them in the model's memory, without slower tiers.
        entries: cached entries over all kv heads, without offloaded ones.
    """

    def __init__(self) -> None:
        self.nbytes = self.device_nbytes = self.entries = 0
        self._own_bytes = self._own_device_bytes = self._own_entries = 0
        self._total: MemoryUsage | None = None
        self._lock = Lock()

    def set_bytes(self, nbytes: int, is_on_device: bool) -> None:
        """Replace the bytes held beside those of usages that joined this one."""
        device = nbytes if is_on_device else 0
        change, device_change = nbytes - self._own_bytes, device - self._own_device_bytes
        self._own_bytes, self._own_device_bytes = nbytes, device
        self._add(change, device_change, 0)

    def add_bytes(self, change: int, is_on_device: bool) -> None:
        """Change the bytes held beside those of usages that joined this one."""
        device_change = change if is_on_device else 0
        self._own_bytes += change
        self._own_device_bytes += device_change
        self._add(change, device_change, 0)

    def set_entries(self, entries: int) -> None:
        """Replace the entries held beside those of usages that joined this one."""
        if entries == self._own_entries:
            return
        change, self._own_entries = entries - self._own_entries, entries
        self._add(0, 0, change)

    def add_entries(self, change: int) -> None:
        """Change the entries held beside those of usages that joined this one."""
        self._own_entries += change
        self._add(0, 0, change)

    @staticmethod
    def add_entries_each(usages: Iterable[MemoryUsage], change: int) -> None:
        """`add_entries` of usages that no other joined, with one change of each of their totals."""
        totals = dict[MemoryUsage, int]()
        for usage in usages:
            usage._own_entries += change
            usage.entries += change
            if usage._total is not None:
                totals[usage._total] = totals.get(usage._total, 0) + change
        for total, changes in totals.items():
            total._add(0, 0, changes)

    def join(self, total: MemoryUsage) -> None:
        """Count into `total` from now on, and no longer into a former total."""
        self.leave()
        self._total = total
        total._add(self.nbytes, self.device_nbytes, self.entries)

    def leave(self) -> None:
        """Count into no total any more."""
        if self._total is not None:
            self._total._add(-self.nbytes, -self.device_nbytes, -self.entries)
            self._total = None

    def _add(self, nbytes: int, device_nbytes: int, entries: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.device_nbytes += device_nbytes
            self.entries += entries
        if self._total is not None:
            self._total._add(nbytes, device_nbytes, entries)


class TensorOwner(ABC):
    """Owner of tensors, alone or through parts, that counts their bytes when they are replaced."""

    counts_as_device: ClassVar[bool] = True  # whether own tensors are in the model's memory

    def __init__(self) -> None:
        self.usage = MemoryUsage()

    @property
    def parts(self) -> tuple[TensorOwner, ...]:
        """Owners whose tensors belong to this one."""
        return ()

    @abstractmethod
    def own_tensors(self) -> tuple[Tensor, ...]:
        """All tensors outside the parts, slack and metadata included."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, slack and metadata included."""
        return *(t for part in self.parts for t in part.tensors()), *self.own_tensors()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, slack and metadata included."""
        return self.usage.nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes between two turns, without slack: at least those of the saved state."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def _count_bytes(self) -> None:
        """Count the own tensors again, after the storage of any of them was replaced."""
        self.usage.set_bytes(storage_bytes(self.own_tensors()), self.counts_as_device)

    def _attach(self, part: Owner, former: TensorOwner | None = None) -> Owner:
        """Count a new part; the part that it replaces, if any, counts no longer."""
        if former is not None:
            former.usage.leave()
        part.usage.join(self.usage)
        return part


class DivisibleStorage:
    """Storage that can be divided at a position. By default, as in most forms, it cannot."""

    def prefix_nbytes(self, length: int) -> int:
        """Bytes of the entries at true positions before `length`, once `divide` was called there;
        0 in forms that it does not divide.
        """
        del length
        return 0

    def divide(self, length: int) -> None:
        """Divide the storage at true position `length`, in every layer that holds it.

        A fork that is cut to `length` then holds no storage of later entries. No effect in forms
        whose decode steps do not read divided storage.
        """
        del length

    def seal(self) -> None:
        """Keep storage that forks hold too as it is: entries that come are stored apart."""

    @property
    def num_storages(self) -> int:
        """Number of storages with entries, shared or not."""
        return 1

    @property
    def shared_length(self) -> int:
        """Entries per head in divided storage that forks hold too."""
        return 0

    def shared_storages(self) -> dict[object, int]:
        """Bytes of each divided storage that forks hold too, by what identifies it."""
        return {}


class ForkFamily:
    """Owners that may hold the same tensors, since these are replaced and never written.

    Owners are held by weak reference: a fork that is dropped shares nothing any more.
    """

    def __init__(self, first: TensorOwner) -> None:
        self._owners = WeakSet[TensorOwner]([first])

    def join(self, owner: TensorOwner) -> None:
        """Add an owner that holds tensors of the others."""
        self._owners.add(owner)

    def shared_bytes(self, owner: TensorOwner) -> int:
        """Bytes of an owner's own tensors that others of the family hold too."""
        others = [each for each in self._owners if each is not owner]
        storages = {_address_of(tensor) for each in others for tensor in each.own_tensors()}
        return storage_bytes(own for own in owner.own_tensors() if _address_of(own) in storages)


def _address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storage of some tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
