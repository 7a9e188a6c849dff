"""Caches stored with 4 bits, and attended to as they are stored.

"Agent Memory Below the Prompt: Persistent Q4 KV Cache for Multi-Agent LLM
Inference on Edge Devices" (2026): every agent's cache is on disk in groups of 64 numbers with 4
bits each and is loaded straight back, without a copy at full precision. Here a lossless cache is
stored in the form of `quantized(bits=4, group=64)`: a restore takes over the codes, kernels read
them block by block, and tokens read after it are exact until the cache is stored again. Groups that
are at least half full keep their codes then, so that most of a text is rounded once.

What differs: keys share scales per channel among 64 tokens, values per token among 64 channels, as
in `int4`. Other caches (compressed by a policy, of models with sliding windows or latents, with
numbers that offsets in float16 cannot hold) are stored as `int4` does, and decoded.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.codec import Codec
from larder.core.errors import CacheError
from larder.core.plan import Plan
from larder.store.blobs.cache_state import is_lossless_cache
from larder.store.codecs.int4 import GROUP, Int4

HELD = Codec(4, 4, GROUP)


class Q4(Int4):
    """Codes of 4 bits that a restored cache holds."""

    has_own_form: ClassVar[bool] = True

    def stored_form(self, cache: SequenceCache) -> SequenceCache:
        """Copy with every entry quantized; caches that it cannot quantize as they are."""
        if cache.cache_spec.form == "graded" and cache.cache_spec.codecs == (HELD,):
            held = SequenceCache.restore(cache.spec, cache.state(), cache.meta())
        elif is_lossless_cache(cache) and not any(each.latent_rank for each in cache.spec.layers):
            held = SequenceCache(cache.spec, "graded", codecs=(HELD,))
            if cache.next_position:
                ChunkEntries.of(cache, 0, cache.next_position).append_to(held)
        else:
            return cache
        try:
            for layer, lengths in enumerate(held.lengths()):
                held.apply(layer, _all_coded(lengths))
        except CacheError:
            return cache
        return held


def _all_coded(lengths: tuple[int, ...]) -> Plan:
    """Plan that keeps every entry, quantized."""
    count = sum(lengths)
    grades = torch.ones(count, dtype=torch.int8)
    return Plan(torch.arange(count), lengths, grades=grades)


Part = Q4
