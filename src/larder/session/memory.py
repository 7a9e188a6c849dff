"""What is left of a conversation after it was read: its caches, and the way to the right one."""

from __future__ import annotations

from dataclasses import dataclass

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.session.matching import Match
from larder.session.policy import Policy
from larder.session.routing import Router
from larder.session.shelf import Shelf
from larder.session.transcript import Transcript


@dataclass(frozen=True)
class Figures:
    """What reading a conversation took and what it left.

    Args:
        context_tokens: tokens of the conversation.
        budget_tokens: M, entries per kv head averaged over managed layers; the context's own
            length where nothing limits it.
        full_kv_bytes: keys and values of a plain cache of the same length.
        kv_bytes: all caches after reading, every byte held.
        active_kv_bytes: the largest cache that one question attends to; where entries are parked,
            its fast tier and the pages that a step fetches.
        peak_kv_bytes: the highest at any time while reading, scratch tokens included.
        peak_entries: the most managed entries at any time, over layers, heads and live caches.
        prefill_seconds: reading, embedding and clustering included.
        setup_seconds: what only the first reading takes: loading the embedder, and measuring what
            the budget needs of the model.
    """

    context_tokens: int
    budget_tokens: int
    full_kv_bytes: int
    kv_bytes: int
    active_kv_bytes: int
    peak_kv_bytes: int
    peak_entries: int
    prefill_seconds: float
    setup_seconds: float = 0.0


@dataclass(frozen=True)
class Memory:
    """A conversation that was read under a policy. The shelf changes; all else stays.

    Args:
        policy: with every size filled in.
    """

    policy: Policy
    conversation: Conversation
    transcript: Transcript
    shelf: Shelf
    router: Router
    figures: Figures

    def recall(self, question: str) -> tuple[SequenceCache, Match | None]:
        """Make the cache for a bare question active and return it with the match."""
        match = self.router.route(question)
        return self.shelf.activate(0 if match is None else match.episode), match
