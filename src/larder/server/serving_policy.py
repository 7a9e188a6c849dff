"""How a policy works on a server, and what a turn under it may take.

Where nothing is ever dropped, each conversation has one cache that grows by what it has not read
yet (`larder.server.session_backend.prefix`). Policies with a budget, and those that keep episodes,
are followed turn by turn as `larder chat` follows them (`larder.server.session_backend.chat`): no
more than the budget between two turns, and no more than budget + block while one runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from larder.cache.latest_activations import latest_queries_bytes
from larder.cache.sequence import SequenceCache
from larder.core.ledger import SURPRISE
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.engine.engine import Engine
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.policy.compensation.drop import Drop
from larder.policy.storage.exact import Exact
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import REREAD_TOKENS, PrefillReader
from larder.prefill.schedules.episodic import Episodic
from larder.server.tiers.device import MemoryDemand
from larder.session.arrangements.single import Single
from larder.session.capacity import (
    HEAD_BYTES,
    NUMBER_BYTES,
    block_tokens,
    budget_tokens,
    budgeted_layers,
    check_recent_fits,
    empty_cache,
    entries_per_head,
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
TRANSIENT_LAYERS = 2  # held for a moment while one is laid out anew: its old storage, and a copy


@dataclass(frozen=True)
class CacheOccupancy:
    """What a cache holds.

    Args:
        entries: over all managed layers and heads.
        read: tokens that it has truly read.
    """

    entries: int = 0
    read: int = 0


@dataclass(frozen=True)
class ServingPolicy:
    """A policy with its sizes filled in, over a loaded model.

    Raises:
        UsageError: the policy is not one that a server can follow.
        BudgetError: its budget cannot hold what it always keeps.
    """

    desk: ModelRuntime
    policy: Policy

    def __post_init__(self) -> None:
        policy, is_single = self.policy, isinstance(self.policy.session, Single)
        require_prompts(
            self._prompts,
            policy.scorer.required_prompts() - (frozenset() if is_single else {"episode"}),
        )
        if self.is_limited:  # what is too small for the policy is refused now, not when asked
            check_recent_fits(policy, self.tokens)
            self.reader(0)
        if self.is_chat:
            self.empty()
            warm_up(self.desk, policy)

    @staticmethod
    def of(engine: Engine) -> ServingPolicy:
        """The engine's policy, under its budget.

        Raises:
            UsageError: as above; or the budget is a share of a context that is not there.
        """
        tokens = resolve_budget_without_context(
            engine.policy, engine.sizes.budget, engine.loaded.decoder.spec
        )
        policy = engine.policy.filled(tokens, engine.sizes.block)
        if isinstance(policy.schedule, Episodic):  # its caches equal those read one by one
            policy = replace(policy, schedule=replace(policy.schedule, together=1))
        return ServingPolicy(engine.desk, policy)

    def exact(self) -> ServingPolicy:
        """The same model, with everything kept."""
        policy = Policy.parse(FULL_POLICY)
        return ServingPolicy(self.desk, policy.filled(budget_tokens(policy), None))

    def __str__(self) -> str:
        return str(self.policy)

    @cached_property
    def tokens(self) -> int:
        """M, entries per kv head."""
        return entries_per_head(self.policy, self.desk.decoder.spec)

    @property
    def budget_tokens(self) -> int | None:
        """Entries per kv head of one cache between two turns, slots for recalled pages included;
        None without a limit."""
        beside = recall_budget_tokens(self.policy) + self.policy.lag
        return self.tokens + beside if self.is_limited else None

    @property
    def is_limited(self) -> bool:
        """Whether anything is ever dropped."""
        return budget_tokens(self.policy) != WITHOUT_LIMIT

    @cached_property
    def is_chat(self) -> bool:
        """Whether sessions are held as `larder chat` holds them."""
        return self.is_limited or not isinstance(self.policy.session, Single)

    @cached_property
    def block(self) -> int:
        """M_block: the most tokens that one step reads."""
        return block_tokens(self.policy)

    @cached_property
    def can_truncate(self) -> bool:
        """Whether the end of a text can be forgotten at any time: no layer slides a window."""
        spec = self.desk.decoder.spec
        return len(spec.managed) == len(spec.layers)

    def empty(self) -> SequenceCache:
        """A cache that has read nothing."""
        return empty_cache(self.policy, self.desk.decoder.spec)

    def reader(self, length: int) -> PrefillReader:
        """What reads a text that will be `length` tokens long."""
        return prefill_reader(self.desk, self.policy, max(length, self.tokens), PeakMemoryMeter())

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether entries go while text is generated."""
        return self.policy.timing.excess() is not None

    def lossless_turn_demand(
        self, held: CacheOccupancy, length: int, new_tokens: int
    ) -> MemoryDemand:
        """The most that a turn can bring a cache to that keeps everything.

        Args:
            held: what it holds before.
            length: of the whole text once the prompt is read.
            new_tokens: the longest answer.
        """
        return self.bytes_of(max(held.read, length) + new_tokens, length, new_tokens)

    def is_lossless(self, cache: SequenceCache) -> bool:
        """Whether the cache holds all that it has read, as it was read."""
        if not self.is_limited:
            return True
        everything = self.heads * cache.next_position
        finest = sum(sum(cache.full_precision_lengths()[each.index]) for each in self._layers)
        return self.policy.storage == Exact() and finest == everything

    def found(self, cache: SequenceCache) -> CacheOccupancy:
        """What the cache gives access to, at once or by looking for it."""
        parked = sum(sum(tier.parked().lengths) for tier in cache.tiers)
        return CacheOccupancy(cache.managed_entries + parked, cache.next_position)

    @property
    def merges(self) -> bool:
        """Whether what goes lives on in others."""
        return not isinstance(self.policy.compensation, Drop)

    @cached_property
    def _layers(self) -> tuple[LayerSpec, ...]:
        return budgeted_layers(self.policy, self.desk.decoder.spec)

    @cached_property
    def heads(self) -> int:
        """Over all layers that the budget is for."""
        return sum(layer.kv_heads for layer in self._layers)

    @cached_property
    def _prompts(self) -> dict[str, tuple[int, ...]]:
        return common_prompts(self.desk.scribe)

    def bytes_of(self, per_head: int, length: int, new_tokens: int) -> MemoryDemand:
        """What a cache takes with so many entries in each head that the budget is for.

        Args:
            length, new_tokens: as in `need`; what the budget is not for holds more by them.
        """
        spec, ledger = self.desk.decoder.spec, self.policy.planner.ledger
        layers = [self._layer_bytes(layer, per_head, length, new_tokens) for layer in spec.layers]
        heads = sum(layer.kv_heads for layer in spec.layers)
        fixed = heads * (HEAD_BYTES + NUMBER_BYTES * len(ledger.scalars))
        tail = spec.width * spec.dtype.itemsize if SURPRISE in ledger.columns else 0
        tail += latest_queries_bytes(ledger.queries, spec.managed, spec.dtype.itemsize)
        scratch = max(layer.bytes_per_token(spec.dtype) for layer in spec.layers) * self._scratch
        passing = TRANSIENT_LAYERS * max(layers) if self.is_limited else max(layers)
        return MemoryDemand(sum(layers) + fixed + tail, passing + scratch)

    def _layer_bytes(self, layer: LayerSpec, per_head: int, length: int, new_tokens: int) -> int:
        spec, columns = self.desk.decoder.spec, len(self.policy.planner.ledger.columns)
        entries = per_head if layer in self._layers else length + new_tokens
        if layer.sliding_window is not None:
            entries = min(length + new_tokens, layer.sliding_window + self.block + new_tokens)
        beside = layer.kv_heads * (POSITION_BYTES + NUMBER_BYTES * columns)
        return entries * (layer.bytes_per_token(spec.dtype) + beside)

    @cached_property
    def _scratch(self) -> int:
        """Tokens that may be read behind the cache to judge it."""
        if not self.is_limited:
            return 0
        names = self.policy.scorer.required_prompts() & self._prompts.keys()
        wanted = [len(self._prompts[name]) for name in names]
        return self.block + sum(wanted) + REREAD_TOKENS
