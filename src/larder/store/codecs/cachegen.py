"""Caches in chunks of tokens, each at several levels, of which a restore loads one (CacheGen).

Yuhan Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model
Serving" (2024), arXiv:2310.07240, section 5.3. A lossless cache of a text is stored as chunks, and
every chunk at each of `levels`. Which one is loaded, or whether the rest of the text is read again,
is up to `larder.store.stream_controller`. Other caches (compressed by a policy, several of a
session, of models with sliding windows or latents) are stored as `entropy` does.
"""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs.entropy import Entropy


class CacheGen(Entropy):
    """Chunks at three levels of entropy coding, finest first."""

    levels: ClassVar[tuple[str, ...]] = ("entropy_fine", "entropy", "entropy_coarse")
    unstreamed: ClassVar[str] = "entropy"


Part = CacheGen
