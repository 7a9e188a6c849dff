"""What is left of a conversation after it was read: its caches, and the way to the right one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.core.observation import Prompts
from larder.session.caches import SessionCaches
from larder.session.episodes.matching import EpisodeMatch
from larder.session.episodes.routing import Router
from larder.session.policy import Policy
from larder.session.transcript.tokenizer_adapter import Transcript


class Coverage(Enum):
    """What bounds the entries of a layer.

    BUDGET: the policy's budget.
    DENSE: nothing; a policy keeps every entry of it, beside the budget.
    WINDOW: the model's own sliding window.
    """

    BUDGET = "budget"
    DENSE = "dense"
    WINDOW = "sliding_window"


@dataclass(frozen=True)
class LayerFigures:
    """What one layer takes of the cache that `Figures.active_kv_bytes` is about.

    Args:
        full_kv_bytes: keys and values of a plain cache of the same length, in this layer.
    """

    layer: int
    coverage: Coverage
    active_kv_bytes: int
    full_kv_bytes: int


@dataclass(frozen=True)
class CacheFigures:
    """What reading a conversation took and what it left.

    Args:
        context_tokens: tokens of the conversation.
        budget_tokens: M, entries per kv head averaged over managed layers; the context's own
            length where nothing limits it.
        full_kv_bytes: keys and values of a plain cache of the same length.
        kv_bytes: all caches after reading, every byte held.
        active_kv_bytes: the largest cache that one question attends to; where entries are parked,
            its fast tier and the pages that a step fetches. Dense layers are counted, so it may
            be a larger part of `full_kv_bytes` than the budget is of the context.
        peak_kv_bytes: the highest at any time while reading, scratch tokens included.
        peak_entries: the most managed entries at any time, over layers, heads and live caches.
        prefill_seconds: reading, embedding and clustering included.
        setup_seconds: what only the first reading takes: loading the embedder, and measuring what
            the budget needs of the model.
        layers: the same layer by layer, for the active cache.
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
    layers: tuple[LayerFigures, ...] = ()

    @property
    def dense(self) -> tuple[LayerFigures, ...]:
        """The layers that the budget leaves whole; empty where it covers none."""
        if all(each.coverage is not Coverage.BUDGET for each in self.layers):
            return ()
        return tuple(each for each in self.layers if each.coverage is Coverage.DENSE)

    @property
    def dense_kv_bytes(self) -> int:
        """Bytes of `active_kv_bytes` in those layers."""
        return sum(each.active_kv_bytes for each in self.dense)


@dataclass(frozen=True)
class ConversationMemory:
    """A conversation that was read under a policy. The shelf changes; all else stays.

    Args:
        policy: with every size filled in.
        prompts: that it was read with, beside those of its episodes.
    """

    policy: Policy
    conversation: Conversation
    transcript: Transcript
    caches: SessionCaches
    router: Router
    figures: CacheFigures
    prompts: Prompts = field(default_factory=dict[str, tuple[int, ...]])

    def recall(self, question: str) -> tuple[SequenceCache, EpisodeMatch | None]:
        """Make the cache for a bare question active and return it with the match."""
        match = self.router.route(question)
        return self.caches.activate(0 if match is None else match.episode), match
