"""How much a prefill held at its highest, measured while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.sequence import SequenceCache


class Meter:
    """Peaks of bytes and of managed entries, over all caches that live at the same time.

    Args:
        parked_bytes: bytes of other caches that stay in memory meanwhile.
    """

    def __init__(self, parked_bytes: int = 0) -> None:
        self.parked_bytes = parked_bytes
        self.peak_bytes = 0
        self.peak_entries = 0

    def park(self, cache: SequenceCache) -> None:
        """Count a finished cache from now on as held elsewhere."""
        self.parked_bytes += cache.nbytes

    def note(self, caches: Sequence[SequenceCache], layer: int, scratch_tokens: int) -> None:
        """Look at the caches while `layer` has `scratch_tokens` more in flight."""
        spec = caches[0].spec
        in_flight = spec.layers[layer].bytes_per_token(spec.dtype) * scratch_tokens
        held = self.parked_bytes + sum(cache.nbytes for cache in caches)
        entries = sum(cache.managed_entries for cache in caches)
        self.peak_bytes = max(self.peak_bytes, held + in_flight)
        self.peak_entries = max(self.peak_entries, entries)
