"""Divisible storage: what a form may offer so that forks share a prefix alone."""

from __future__ import annotations


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
    def shared_length(self) -> int:
        """Entries per head in divided storage that forks hold too."""
        return 0

    def shared_storages(self) -> dict[object, int]:
        """Bytes of each divided storage that forks hold too, by what identifies it."""
        return {}
