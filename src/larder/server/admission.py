"""Admission control: upper bound of the memory of a turn, and whether it can ever fit.

A turn that fits waits in the queue until `Scheduler` finds the memory free.
"""

from __future__ import annotations

from larder.cache.forms.ragged import GROWTH_TOKENS
from larder.core.errors import BudgetError
from larder.core.spec import RecomputeSource
from larder.prefill.schedules.whole import BLOCK_TOKENS
from larder.server.api_errors import kv_budget_exceeded
from larder.server.serving_policy import ServingPolicy
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.session.arrangements.single import Single
from larder.session.capacity import budgeted_layers, recall_slot_entries

END_OF_TURN_TOKENS = 32  # at most, for the end of a turn
MOST_EPISODES = 16  # twice the default
# Size of a recall index: a factor of the offloaded bytes, and a constant per head.
INDEX_FACTOR, INDEX_HEAD_BYTES = 2, 8192
UNDO_COPIES = 2  # while a turn may be rolled back


def check_demand(tenant: str, demand: MemoryDemand, reservations: DeviceReservations) -> None:
    """Raise if a turn could not be granted its memory even on an otherwise empty device.

    Raises:
        ApiError: 400 `kv_budget_exceeded`.
    """
    if why := reservations.exceeded_limit(tenant, demand):
        raise kv_budget_exceeded(
            BudgetError(
                f"The keys and values of the conversation with the longest answer may take {why}: "
                "shorten it, ask for fewer new tokens (max_tokens), or have that limit raised."
            )
        )


def chat_turn_demand(
    serving: ServingPolicy, length: int, prompt: int, new_tokens: int, episodes: int
) -> MemoryDemand:
    """Upper bound of the memory that a turn of a chat session takes.

    Args:
        serving: the policy of the session.
        length: tokens of the whole text once the prompt is read.
        prompt: new tokens among them.
        new_tokens: the longest answer.
        episodes: the number of caches that the session has.
    """
    whole = length + new_tokens + END_OF_TURN_TOKENS
    idle_entries = min(whole, _idle_entries(serving))
    active_entries = min(whole, _active_entries(serving))
    device = serving.cache_demand(active_entries, whole, 0)
    if _has_second_cache(serving, prompt + new_tokens):
        device = _sum(device, serving.cache_demand(idle_entries, whole, 0))
    rebuilt = serving.cache_demand(min(whole, _rebuild_entries(serving, length)), whole, 0)
    transient = max(device.transient_bytes, rebuilt.transient_bytes) + _scratch_bytes(
        serving, whole
    )
    nbytes = max(device.bytes, rebuilt.bytes) + _source_bytes(serving, whole)
    return MemoryDemand(nbytes, transient, _host_bytes(serving, whole, idle_entries, episodes))


def _idle_entries(serving: ServingPolicy) -> int:
    """Entries per head of a cache between two turns."""
    return serving.tokens + _slots(serving) + _slack(serving)


def _slots(serving: ServingPolicy) -> int:
    return recall_slot_entries(serving.policy, serving.runtime.decoder.spec) + serving.policy.lag


def _slack(serving: ServingPolicy) -> int:
    excess = serving.policy.timing.excess()
    return 0 if excess is None else excess + GROWTH_TOKENS


def _active_entries(serving: ServingPolicy) -> int:
    """Entries per head of a cache while it answers, page slots included."""
    return serving.tokens + 2 * _slots(serving) + serving.block + GROWTH_TOKENS


def _rebuild_entries(serving: ServingPolicy, length: int) -> int:
    """Entries per head of a cache that is rebuilt from its text."""
    if not serving.policy.schedule.has_blocks:
        return length
    return serving.tokens + _slots(serving) + serving.block + GROWTH_TOKENS


def _has_second_cache(serving: ServingPolicy, tokens: int) -> bool:
    """True if a turn of this many tokens needs a second cache on the device: a copy, or a new
    episode's."""
    is_single = isinstance(serving.policy.session, Single)
    return (
        serving.evicts_while_decoding
        or not is_single
        or tokens + END_OF_TURN_TOKENS > serving.block
    )


def _sum(one: MemoryDemand, other: MemoryDemand) -> MemoryDemand:
    return MemoryDemand(one.bytes + other.bytes, max(one.transient_bytes, other.transient_bytes))


def _scratch_bytes(serving: ServingPolicy, length: int) -> int:
    """Bytes of one layer's keys and values beyond the cache, read to score the
    whole text at once."""
    if serving.policy.schedule.has_blocks:
        return 0
    spec = serving.runtime.decoder.spec
    largest = max(layer.bytes_per_token(spec.dtype) for layer in spec.layers)
    return largest * (length + BLOCK_TOKENS)


def _source_bytes(serving: ServingPolicy, length: int) -> int:
    """Bytes of the inputs that keys and values are rebuilt from, and one layer of them twice."""
    rebuilding, spec = serving.policy.rebuilding, serving.runtime.decoder.spec
    if rebuilding is None:
        return 0
    layers = len(spec.layers) + 1 if rebuilding.source is RecomputeSource.EVERY else 2
    heads = sum(layer.kv_heads for layer in spec.layers)
    row = max(spec.width, 1) * spec.dtype.itemsize * layers + 2 * heads * 8
    return length * row * UNDO_COPIES


def _host_bytes(serving: ServingPolicy, length: int, idle_entries: int, episodes: int) -> int:
    """Bytes of inactive caches, of offloaded entries and of their recall indexes."""
    policy, spec = serving.policy, serving.runtime.decoder.spec
    count = 0
    if not isinstance(policy.session, Single):
        count = 2 * max(episodes + 1, MOST_EPISODES)
    elif episodes:
        count = 1
    cache_bytes = count * serving.cache_demand(idle_entries, length, 0).bytes
    if policy.recall is None:
        return cache_bytes
    offloaded = sum(layer.bytes_per_token(spec.dtype) for layer in budgeted_layers(policy, spec))
    heads = sum(layer.kv_heads for layer in spec.managed)
    return cache_bytes + UNDO_COPIES * (
        length * offloaded * (1 + INDEX_FACTOR) + heads * INDEX_HEAD_BYTES
    )
