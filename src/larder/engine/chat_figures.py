"""What a chat holds, in numbers and texts, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFigures:
    """A chat's memory at one moment.

    Args:
        turns: said so far, those of former processes included.
        log_tokens: tokens of history and turns.
        budget_tokens: M, entries per kv head averaged over managed layers.
        block_tokens: M_block; a cache is refreshed when it exceeds M + M_block.
        full_kv_bytes: keys and values of a plain cache of `log_tokens`.
        active_kv_bytes: of the cache on the device without its slow tier; 0 before the first turn.
        parked_kv_bytes: of the caches and slow tiers in host memory.
        peak_kv_bytes: the highest of all caches together at any time, scratch tokens included.
        peak_entries: the most managed entries of the cache in use, over layers and heads.
        refreshes: how often caches were built anew since the chat was opened.
        opened: episodes that turns have opened since then.
        write_backs: how often an active cache made room for another, its turns included.
    """

    turns: int
    log_tokens: int
    budget_tokens: int
    block_tokens: int
    full_kv_bytes: int
    active_kv_bytes: int
    parked_kv_bytes: int
    peak_kv_bytes: int
    peak_entries: int
    refreshes: int
    opened: int
    write_backs: int

    @property
    def kv_bytes(self) -> int:
        """All caches together."""
        return self.active_kv_bytes + self.parked_kv_bytes


@dataclass(frozen=True)
class ChatEpisode:
    """One cache of a chat.

    Args:
        entries_per_head: averaged over managed layers.
        kv_bytes: every byte held.
        next_position: tokens it has truly read.
        segments: that are filed under it; 0 where there are no episodes.
        prompt_texts: the segments that it was judged by.
        is_active: whether it is on the device.
    """

    number: int
    entries_per_head: float
    kv_bytes: int
    next_position: int
    segments: int
    prompt_texts: tuple[str, ...]
    is_active: bool


@dataclass(frozen=True)
class TurnOutcome:
    """What became of the latest turn.

    Args:
        answered_by: the cache that answered.
        filed_in: the cache that holds the turn; another one if it opened an episode.
        refreshes: how many refreshes followed.
    """

    answered_by: int
    filed_in: int
    refreshes: int

    @property
    def is_new_episode(self) -> bool:
        return self.filed_in != self.answered_by
