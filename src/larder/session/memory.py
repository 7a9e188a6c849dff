"""Memory of a prefilled conversation: caches, router, and figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.core.observation import Prompts
from larder.prefill.base import ContextReuse
from larder.session.caches import SessionCaches
from larder.session.policy import Policy
from larder.session.routing import EpisodeMatch, Router
from larder.session.transcript.tokenizer_adapter import TokenizedTranscript


class Coverage(Enum):
    """Bound of the entries of a layer.

    BUDGET: the budget of the policy.
    DENSE: none; the policy keeps every entry, beyond the budget.
    WINDOW: the sliding window of the model.
    SHARED: that of the layer whose entries it attends to; the layer holds none.
    """

    BUDGET = "budget"
    DENSE = "dense"
    WINDOW = "sliding_window"
    SHARED = "shared"


@dataclass(frozen=True)
class LayerFigures:
    """Bytes of one layer of the cache of `CacheFigures.active_kv_bytes`.

    Args:
        full_kv_bytes: keys and values of a plain cache of the same length, in this layer.
    """

    layer: int
    coverage: Coverage
    active_kv_bytes: int
    full_kv_bytes: int


@dataclass(frozen=True)
class CacheFigures:
    """Memory and time of the prefill of a conversation.

    Args:
        context_tokens: number of tokens of the conversation.
        budget_tokens: M, entries per kv head averaged over managed layers; the length of the
            context without a limit.
        full_kv_bytes: a plain cache of the same length, states of recurrent layers included.
        kv_bytes: bytes of all caches after prefill.
        active_kv_bytes: bytes of the largest cache that one question attends to; where entries are
            offloaded, of its fast tier and page slots. Dense layers are counted, so it may be a
            larger part of `full_kv_bytes` than the budget is of the context.
        peak_kv_bytes: peak bytes during prefill, scratch tokens included.
        peak_entries: peak of managed entries over layers, heads and live caches.
        prefill_seconds: time of prefill, embedding and clustering.
        setup_seconds: time that only the first prefill takes: loading the embedder, and
            calibration of the model.
        layers: figures by layer, for the active cache.
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
    layers: tuple[LayerFigures, ...] = field(default=(), repr=False)

    @property
    def dense(self) -> tuple[LayerFigures, ...]:
        """Layers that the budget leaves whole; empty where it covers none."""
        if all(each.coverage is not Coverage.BUDGET for each in self.layers):
            return ()
        return tuple(each for each in self.layers if each.coverage is Coverage.DENSE)

    @property
    def dense_kv_bytes(self) -> int:
        """Bytes of `active_kv_bytes` in dense layers."""
        return sum(each.active_kv_bytes for each in self.dense)


@dataclass(frozen=True)
class ConversationMemory:
    """Conversation prefilled under a policy. Immutable except for its caches.

    Args:
        policy: policy with every size filled in.
        conversation: what was read.
        transcript: its tokens.
        caches: one cache, or one per episode.
        router: finds the episode of a question.
        figures: bytes and times of the prefill.
        prompts: scoring prompts of the prefill, in addition to those of its episodes.
        reuse: contexts of the prompt, and what was reused of them; empty without contexts.

    Examples:
        >>> memory = engine.read("My cat is called Minka. " * 20)
        >>> memory.figures.kv_bytes <= memory.figures.full_kv_bytes
        True
    """

    policy: Policy
    conversation: Conversation
    transcript: TokenizedTranscript
    caches: SessionCaches
    router: Router
    figures: CacheFigures
    prompts: Prompts = field(default_factory=dict[str, tuple[int, ...]])
    reuse: ContextReuse = ContextReuse()

    def __repr__(self) -> str:
        figures = self.figures
        return (
            f"ConversationMemory({self.conversation.name!r}, policy={self.policy.short!r}, "
            f"tokens={figures.context_tokens}, budget_tokens={figures.budget_tokens}, "
            f"kv_bytes={figures.kv_bytes}, full_kv_bytes={figures.full_kv_bytes})"
        )

    def activate_for(self, question: str) -> tuple[SequenceCache, EpisodeMatch | None]:
        """Make the cache for a bare question active and return it with the match.

        Args:
            question: without chat template.

        Returns:
            The cache, and the episode that was found; None where the policy forms no episodes.

        Examples:
            >>> cache, match = memory.activate_for("What is the cat called?")
            >>> cache.next_position == memory.figures.context_tokens
            True
        """
        match = self.router.route(question)
        return self.caches.activate(0 if match is None else match.episode), match
