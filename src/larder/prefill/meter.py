"""How much a prefill held at its highest, measured while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.sequence import SequenceCache


class PeakMemoryMeter:
    """Peaks of bytes and of managed entries, over all caches that live at the same time.

    Bytes are those of every tensor that a cache owns, of storage that is just being replaced, and
    of the keys and values that a scratch pass reads behind the caches.

    `peak_live_bytes` is that of the fast tiers of the caches being read alone.

    Args:
        parked_bytes: bytes of other caches that stay in memory meanwhile.
    """

    def __init__(self, parked_bytes: int = 0) -> None:
        self.parked_bytes = parked_bytes
        self.peak_bytes = 0
        self.peak_live_bytes = 0
        self.peak_entries = 0

    def park(self, cache: SequenceCache) -> None:
        """Count a finished cache from now on as held elsewhere."""
        self.parked_bytes += cache.nbytes

    def note(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        """Look at the caches right after a change.

        Args:
            passing_bytes: held beside them at the height of that change.
        """
        held = self.parked_bytes + sum(cache.nbytes for cache in caches)
        entries = sum(cache.managed_entries for cache in caches)
        self.peak_bytes = max(self.peak_bytes, held + passing_bytes)
        live = sum(cache.fast_nbytes for cache in caches)
        self.peak_live_bytes = max(self.peak_live_bytes, live + passing_bytes)
        self.peak_entries = max(self.peak_entries, entries)
