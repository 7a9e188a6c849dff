"""Who uses one storage of parked entries, and up to where.

Tiers that share a storage never change what stands in it. One of them may write behind its own last
entries where nobody else has any; all others, once they grow, take a storage of their own.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

Lengths = tuple[int, ...]


class StorageOwners:
    """Of one storage. Safe from several threads at once; who is gone owns nothing."""

    def __init__(self, first: object, lengths: Lengths) -> None:
        self._lock = Lock()
        self._lengths: WeakKeyDictionary[object, Lengths] = WeakKeyDictionary({first: lengths})

    def join(self, owner: object, lengths: Lengths) -> None:
        """One more uses the storage, up to so many entries of each head."""
        with self._lock:
            self._lengths[owner] = lengths

    def leave(self, owner: object) -> None:
        """One uses it no more."""
        with self._lock:
            self._lengths.pop(owner, None)

    def claim(self, owner: object, lengths: Lengths) -> bool:
        """Have the rows up to `lengths` be this one's alone; False where somebody else has any."""
        with self._lock:
            own = self._lengths[owner]
            others = [each for other, each in self._lengths.items() if other is not owner]
            grows = [head for head, length in enumerate(lengths) if length > own[head]]
            if any(each[head] > own[head] for each in others for head in grows):
                return False
            self._lengths[owner] = tuple(map(max, own, lengths))
            return True

    @property
    def are_several(self) -> bool:
        """Whether anybody shares the storage."""
        return len(self._lengths) > 1
