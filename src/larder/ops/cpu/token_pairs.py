"""Pairs of tokens that together are another token: the merges that a vocabulary implies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from larder.ops.cpu.c_library import c_library


def token_pairs(vocabulary: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """First and second parts, in the order of the tokens that they make, the longest first part
    first.

    Args:
        vocabulary: numbers of the tokens, in their order from 0.
    """
    library = c_library()
    if library is None or not hasattr(library, "larder_token_pairs") or not vocabulary:
        return list_pairs(vocabulary)
    texts = [token.encode("utf-8") for token in vocabulary]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    pairs = np.empty((int(starts[-1]), 2), np.int32)
    found = library.larder_token_pairs(
        b"".join(texts), starts.ctypes.data, len(texts), int(lengths.max()), pairs.ctypes.data
    )
    if found < 0:
        raise MemoryError("The search for pairs of tokens could not allocate its buffers.")
    return pairs[:found, 0].tolist(), pairs[:found, 1].tolist()


def list_pairs(vocabulary: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Readable form of `token_pairs`."""
    pairs = [
        (vocabulary[token[:cut]], vocabulary[token[cut:]])
        for token in vocabulary
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [left for left, _ in pairs], [right for _, right in pairs]
