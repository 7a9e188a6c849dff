"""What the model would say next, said behind the caches and then forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from larder.cache.sequence import SequenceCache
from larder.core.observation import ScratchPrompt
from larder.core.types import Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer


def greedy_tokens(
    decoder: Decoder, rows: Sequence[BatchSegment], mode: Mode, observer: Observer | None = None
) -> list[int]:
    """Read rows, and tell the likeliest token behind each."""
    ends = [total - 1 for total in accumulate(len(row.ids) for row in rows)]
    return decoder.predict(rows, mode, ends, observer).argmax(-1).tolist()


def with_drafts(
    decoder: Decoder,
    caches: Sequence[SequenceCache],
    asked: Sequence[ScratchPrompt],
    following: Sequence[int],
) -> list[ScratchPrompt]:
    """Scratch prompts with their drafts behind them, as many for each.

    The caches stay as they are, so a draft is read anew for each token that is added to it.

    Args:
        following: the likeliest token right behind each cache, for prompts without tokens.
    """
    for _ in range(asked[0].drafts):
        said = following
        if asked[0].ids:
            pairs = zip(caches, asked, strict=True)
            rows = [BatchSegment(cache, each.ids, shift=each.shift) for cache, each in pairs]
            said = greedy_tokens(decoder, rows, Mode.SCRATCH)
        longer = [(*each.ids, token) for each, token in zip(asked, said, strict=True)]
        pairs = zip(asked, longer, strict=True)
        asked = [replace(each, ids=ids, drafts=each.drafts - 1) for each, ids in pairs]
    return list(asked)
