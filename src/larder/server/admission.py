"""The most that a turn of a session that is held as a chat may take, before any of it is there."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.forms.ragged import GROWTH_TOKENS
from larder.core.spec import RecomputeSource
from larder.prefill.schedules.whole import BLOCK_TOKENS, Whole
from larder.server.serving_policy import CacheOccupancy, ServingPolicy
from larder.server.session_state import CompletedTurn
from larder.server.tiers.device import MemoryDemand
from larder.session.arrangements.single import Single
from larder.session.capacity import budgeted_layers, recall_slot_entries

END_OF_TURN_TOKENS = 32  # what ends a turn, at most
MOST_EPISODES = 16  # twice what is chosen by itself
# What finds parked entries again: in bytes of the entries, and of each head whatever it holds.
INDEX_FACTOR, INDEX_HEAD_BYTES = 2, 8192
UNDO_COPIES = 2  # while a turn may be undone


def chat_turn_demand(
    rule: ServingPolicy, length: int, prompt: int, new_tokens: int, episodes: int
) -> MemoryDemand:
    """What the caches come to, at most.

    Args:
        length: of the whole text once the prompt is read.
        prompt: tokens of it that are new.
        new_tokens: the longest answer.
        episodes: caches that there are.
    """
    whole = length + new_tokens + END_OF_TURN_TOKENS
    resting = min(whole, _idle_entries(rule))
    answering = min(whole, _active_entries(rule))
    device = rule.bytes_of(answering, whole, 0)
    if _has_second_cache(rule, prompt + new_tokens):
        device = _joined(device, rule.bytes_of(resting, whole, 0))
    built = rule.bytes_of(min(whole, _rebuild_entries(rule, length)), whole, 0)
    passing = max(device.transient_bytes, built.transient_bytes) + _scratch_bytes(rule, whole)
    nbytes = max(device.bytes, built.bytes) + _source_bytes(rule, whole)
    return MemoryDemand(nbytes, passing, _host_bytes(rule, whole, resting, episodes))


def _idle_entries(rule: ServingPolicy) -> int:
    """Entries per head of a cache between two turns."""
    return rule.tokens + _slots(rule) + _slack(rule)


def _slots(rule: ServingPolicy) -> int:
    return recall_slot_entries(rule.policy, rule.desk.decoder.spec) + rule.policy.lag


def _slack(rule: ServingPolicy) -> int:
    excess = rule.policy.timing.excess()
    return 0 if excess is None else excess + GROWTH_TOKENS


def _active_entries(rule: ServingPolicy) -> int:
    """Entries per head of a cache that answers, slots for pages included."""
    return rule.tokens + 2 * _slots(rule) + rule.block + GROWTH_TOKENS


def _rebuild_entries(rule: ServingPolicy, length: int) -> int:
    """Entries per head of a cache that is read anew."""
    if isinstance(rule.policy.schedule, Whole):
        return length
    return rule.tokens + _slots(rule) + rule.block + GROWTH_TOKENS


def _has_second_cache(rule: ServingPolicy, tokens: int) -> bool:
    """Whether a turn of so many tokens has a second cache on the device: a copy, or a new
    episode's."""
    is_single = isinstance(rule.policy.session, Single)
    return rule.evicts_while_decoding or not is_single or tokens + END_OF_TURN_TOKENS > rule.block


def _joined(one: MemoryDemand, other: MemoryDemand) -> MemoryDemand:
    return MemoryDemand(one.bytes + other.bytes, max(one.transient_bytes, other.transient_bytes))


def _scratch_bytes(rule: ServingPolicy, length: int) -> int:
    """Keys and values of a layer that are read behind a cache to judge all of it at once."""
    if not isinstance(rule.policy.schedule, Whole):
        return 0
    spec = rule.desk.decoder.spec
    largest = max(layer.bytes_per_token(spec.dtype) for layer in spec.layers)
    return largest * (length + BLOCK_TOKENS)


def _source_bytes(rule: ServingPolicy, length: int) -> int:
    """What stands for tokens whose keys and values are rebuilt, and a layer of it twice."""
    rebuilding, spec = rule.policy.rebuilding, rule.desk.decoder.spec
    if rebuilding is None:
        return 0
    layers = len(spec.layers) + 1 if rebuilding.source is RecomputeSource.EVERY else 2
    heads = sum(layer.kv_heads for layer in spec.layers)
    row = max(spec.width, 1) * spec.dtype.itemsize * layers + 2 * heads * 8
    return length * row * UNDO_COPIES


def _host_bytes(rule: ServingPolicy, length: int, resting: int, episodes: int) -> int:
    """Caches that do not answer, what is parked of those that do, and what finds it."""
    policy, spec = rule.policy, rule.desk.decoder.spec
    count = 0
    if not isinstance(policy.session, Single):
        count = 2 * max(episodes + 1, MOST_EPISODES)
    elif episodes:
        count = 1
    held = count * rule.bytes_of(resting, length, 0).bytes
    if policy.recall is None:
        return held
    parked = sum(layer.bytes_per_token(spec.dtype) for layer in budgeted_layers(policy, spec))
    heads = sum(layer.kv_heads for layer in spec.managed)
    return held + UNDO_COPIES * (length * parked * (1 + INDEX_FACTOR) + heads * INDEX_HEAD_BYTES)


def turn_demand(
    rule: ServingPolicy, said: Sequence[CompletedTurn], length: int, new_tokens: int
) -> MemoryDemand:
    """Of a turn that begins with nothing but the text, however its session is held."""
    if rule.is_chat:
        prompt = length - sum(each.tokens for each in said)
        return chat_turn_demand(rule, length, prompt, new_tokens, 0)
    return rule.lossless_turn_demand(CacheOccupancy(), length, new_tokens)
