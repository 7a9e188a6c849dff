"""Choice of a level for the next chunk of a streamed cache, against a deadline (CacheGen).

Yuhan Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model
Serving" (2024), arXiv:2310.07240, section 5.3 and its appendix. Before each chunk the bandwidth of
the chunk before it is taken for that of all that are left, and

- the text is sent where the model reads what is left in the time that remains, since that loses
  nothing;
- else the finest level at which all that is left comes in time.

`StreamRule.CODE` is the rule of the released code: the finest level at which this chunk alone takes
less than an equal share of the whole deadline, else text.

Inferred: where no level is in time either, the sooner of the coarsest level and the text; the
middle level for the first chunk where no bandwidth is known; text is all that is left, not one
chunk, so that the caller can continue as after any other prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from larder.core.errors import BadParameter


class StreamRule(Enum):
    """Rule of adaptation: of the paper, by the time that remains, or of its code, by chunk."""

    PAPER = "paper"
    CODE = "code"


@dataclass(frozen=True)
class StreamProgress:
    """State of a restore between two chunks.

    Args:
        sizes: bytes of the chunks that are left, at each level, finest first.
        chunks: number of all chunks of the cache.
        elapsed: seconds since the restore began.
        bandwidth: bytes per second, decoding included; None if unknown.
        recompute: seconds in which the model reads what is left; None if unknown.
    """

    sizes: Sequence[Sequence[int]]
    chunks: int
    elapsed: float = 0.0
    bandwidth: float | None = None
    recompute: float | None = None

    @property
    def levels(self) -> range:
        """Levels, finest first."""
        return range(len(self.sizes[0]))

    def seconds(self, level: int) -> float:
        """Seconds in which all that is left comes at a level; infinite if that is unknown."""
        if self.bandwidth is None:
            return math.inf
        return sum(chunk[level] for chunk in self.sizes) / self.bandwidth


@dataclass(frozen=True)
class StreamController:
    """Level of each chunk of a cache that is restored within a deadline.

    Args:
        seconds: deadline of the whole restore; infinite to load the finest level.
        rule: how the level follows from it.

    Raises:
        BadParameter: the deadline is not positive.
    """

    seconds: float = math.inf
    rule: StreamRule = StreamRule.PAPER

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise BadParameter(
                f"A deadline of a restore must be above 0 seconds, got {self.seconds}: leave it "
                "out to load caches at their finest level."
            )

    def level(self, now: StreamProgress) -> int | None:
        """Level of the next chunk; None if the rest of the text is to be read again."""
        if self.seconds == math.inf:
            return 0
        if self.rule is StreamRule.CODE:
            return self._level_of_chunk(now)
        left = self.seconds - now.elapsed
        if now.recompute is not None and now.recompute <= left:
            return None
        if now.bandwidth is None:
            return len(now.levels) // 2
        for level in now.levels:
            if now.seconds(level) <= left:
                return level
        coarsest = now.levels[-1]
        is_sooner = now.recompute is not None and now.recompute < now.seconds(coarsest)
        return None if is_sooner else coarsest

    def _level_of_chunk(self, now: StreamProgress) -> int | None:
        if now.bandwidth is None:
            return len(now.levels) // 2
        share = self.seconds / now.chunks
        fitting = (level for level in now.levels if now.sizes[0][level] / now.bandwidth < share)
        return next(fitting, None)
