"""Policy of a served session with its sizes, and the memory bounds of a turn under it.

Without eviction each session has one cache, extended by the tokens that it lacks
(`larder.server.session_backend.prefix`). Policies with a budget or with episodes run turn by turn,
as `larder chat` runs them (`larder.server.session_backend.chat`): at most the budget between two
turns, and at most budget + block during one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from larder.cache.sequence import SequenceCache
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.engine.engine import Engine
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.policy.compensation.drop import Drop
from larder.policy.storage.exact import Exact
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import REREAD_TOKENS, PrefillReader
from larder.prefill.schedules.episodic import Episodic
from larder.server.tiers.device import MemoryDemand
from larder.session.arrangements.single import Single
from larder.session.capacity import (
    NUMBER_BYTES,
    block_tokens,
    budget_tokens,
    budgeted_layers,
    check_recent_fits,
    empty_cache,
    entries_per_head,
    fixed_bytes,
    recall_budget_tokens,
    resolve_budget_without_context,
)
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    common_prompts,
    prefill_reader,
    require_prompts,
    warm_up,
)

FULL_POLICY = "full"
TRANSIENT_LAYERS = 2  # held for a moment during a reallocation: old storage and copy
# States of recurrent layers beside the cache's own: before the turn, before its open block, before
# its last pass, and the one that a pass computes.
STATE_COPIES = 4


@dataclass(frozen=True)
class CacheOccupancy:
    """Entries and length of a cache.

    Args:
        entries: over all managed layers and heads.
        read: tokens that the cache has read.
    """

    entries: int = 0
    read: int = 0


@dataclass(frozen=True)
class ServingPolicy:
    """A policy with its sizes filled in, over a loaded model.

    Raises:
        UsageError: the policy cannot be served.
        BudgetError: the budget is smaller than what the policy always keeps.
    """

    runtime: ModelRuntime
    policy: Policy

    def __post_init__(self) -> None:
        policy, is_single = self.policy, isinstance(self.policy.session, Single)
        require_prompts(
            self._prompts,
            policy.scorer.required_prompts() - (frozenset() if is_single else {"episode"}),
        )
        if self.is_limited:  # reject a budget that is too small now, not at the first request
            check_recent_fits(policy, self.tokens)
            self.reader(0)
        if self.is_chat:
            self.empty_cache()
            warm_up(self.runtime, policy)

    @staticmethod
    def of(engine: Engine) -> ServingPolicy:
        """The engine's policy, under its budget.

        Raises:
            UsageError: the policy cannot be served; or its budget is a fraction of a context that
                does not exist.
        """
        tokens = resolve_budget_without_context(
            engine.policy, engine.sizes.budget, engine.loaded.decoder.spec
        )
        policy = engine.policy.with_sizes(tokens, engine.sizes.block)
        if isinstance(policy.schedule, Episodic):  # the result equals that of reading one by one
            policy = replace(policy, schedule=replace(policy.schedule, together=1))
        return ServingPolicy(engine.runtime, policy)

    def exact(self) -> ServingPolicy:
        """The lossless policy of the same model."""
        policy = Policy.parse(FULL_POLICY)
        return ServingPolicy(self.runtime, policy.with_sizes(budget_tokens(policy), None))

    def __str__(self) -> str:
        return str(self.policy)

    @cached_property
    def tokens(self) -> int:
        """M, entries per kv head."""
        return entries_per_head(self.policy, self.runtime.decoder.spec)

    @property
    def budget_tokens(self) -> int | None:
        """Entries per kv head of one cache between two turns, slots for recalled pages included;
        None without a limit."""
        extra = recall_budget_tokens(self.policy) + self.policy.lag
        return self.tokens + extra if self.is_limited else None

    @property
    def is_limited(self) -> bool:
        """True if entries may be evicted."""
        return budget_tokens(self.policy) != WITHOUT_LIMIT

    @property
    def is_exact_with_contexts(self) -> bool:
        """True if contexts that are read apart have the entries of one text."""
        return self.policy.schedule.cache_form == "dense"

    @cached_property
    def is_chat(self) -> bool:
        """True if sessions use the chat backend."""
        return self.is_limited or not isinstance(self.policy.session, Single)

    @cached_property
    def block(self) -> int:
        """M_block: maximum number of tokens in one step."""
        return block_tokens(self.policy)

    @cached_property
    def can_truncate(self) -> bool:
        """True if a cache can be truncated at any time."""
        return self.runtime.decoder.spec.can_truncate

    def empty_cache(self) -> SequenceCache:
        """A new cache."""
        return empty_cache(self.policy, self.runtime.decoder.spec)

    def reader(self, length: int) -> PrefillReader:
        """Prefill reader for a text of `length` tokens."""
        return prefill_reader(
            self.runtime, self.policy, max(length, self.tokens), PeakMemoryMeter()
        )

    @property
    def evicts_while_decoding(self) -> bool:
        """True if entries may be evicted while text is generated."""
        return self.policy.timing.excess() is not None

    def lossless_turn_demand(
        self, before: CacheOccupancy, length: int, new_tokens: int
    ) -> MemoryDemand:
        """Upper bound of the memory of a turn over a lossless cache.

        Args:
            held: occupancy before the turn.
            length: tokens of the whole text once the prompt is read.
            new_tokens: the longest answer.
        """
        return self.cache_demand(max(before.read, length) + new_tokens, length, new_tokens)

    def is_lossless(self, cache: SequenceCache) -> bool:
        """True if the cache holds everything it has read, at full precision."""
        if not self.is_limited:
            return True
        everything = self.heads * cache.next_position
        full_precision = sum(
            sum(cache.full_precision_lengths()[each.index]) for each in self._layers
        )
        return self.policy.storage == Exact() and full_precision == everything

    def occupancy(self, cache: SequenceCache) -> CacheOccupancy:
        """Entries that a cache gives access to, offloaded ones included."""
        parked = sum(sum(tier.parked().lengths) for tier in cache.tiers)
        return CacheOccupancy(cache.managed_entries + parked, cache.next_position)

    @property
    def merges(self) -> bool:
        """True if evicted entries are merged into others."""
        return not isinstance(self.policy.compensation, Drop)

    @cached_property
    def _layers(self) -> tuple[LayerSpec, ...]:
        return budgeted_layers(self.policy, self.runtime.decoder.spec)

    @cached_property
    def heads(self) -> int:
        """Number of kv heads in all budgeted layers."""
        return sum(layer.kv_heads for layer in self._layers)

    @cached_property
    def _prompts(self) -> dict[str, tuple[int, ...]]:
        return common_prompts(self.runtime.tokenizer)

    def cache_demand(self, per_head: int, length: int, new_tokens: int) -> MemoryDemand:
        """Memory of a cache with this many entries in each budgeted head.

        Args:
            length, new_tokens: as in `lossless_turn_demand`; layers without a budget grow with
                them.
        """
        spec = self.runtime.decoder.spec
        layers = [self._layer_bytes(layer, per_head, length, new_tokens) for layer in spec.layers]
        heads = sum(layer.kv_heads for layer in spec.layers)
        fixed = fixed_bytes(self.policy, spec, heads)
        scratch = max(layer.bytes_per_token(spec.dtype) for layer in spec.layers) * self._scratch
        transient = TRANSIENT_LAYERS * max(layers) if self.is_limited else max(layers)
        states = STATE_COPIES * spec.recurrent_bytes
        return MemoryDemand(sum(layers) + fixed, transient + scratch + states)

    def _layer_bytes(self, layer: LayerSpec, per_head: int, length: int, new_tokens: int) -> int:
        if layer.kv_source is not None:
            return 0
        spec, columns = self.runtime.decoder.spec, len(self.policy.planner.ledger.columns)
        entries = per_head if layer in self._layers else length + new_tokens
        if layer.sliding_window is not None:
            # A block, and as many entries in front of it, for a rollback of the block before.
            entries = min(length + new_tokens, layer.sliding_window + 2 * self.block + new_tokens)
        if spec.arena is not None:  # the last page of each head is held whole
            entries = -(-entries // spec.arena.page_tokens) * spec.arena.page_tokens
        extra = layer.kv_heads * (POSITION_BYTES + NUMBER_BYTES * columns)
        return entries * (layer.bytes_per_token(spec.dtype) + extra)

    @cached_property
    def _scratch(self) -> int:
        """Tokens that may be read behind the cache to score it."""
        if not self.is_limited:
            return 0
        names = self.policy.scorer.required_prompts() & self._prompts.keys()
        lengths = [len(self._prompts[name]) for name in names]
        return self.block + sum(lengths) + REREAD_TOKENS
