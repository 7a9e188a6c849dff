"""The most that a turn of a session that is held as a chat may take, before any of it is there."""

from __future__ import annotations

from collections.abc import Sequence

from larder.cache.forms.ragged import GROWTH_TOKENS
from larder.core.rebuilding import RecomputeSource
from larder.prefill.schedules.whole import PIECE_TOKENS, Whole
from larder.server.budget import Need
from larder.server.rule import Held, Rule
from larder.server.sitting import Said
from larder.session.arrangements.single import Single
from larder.session.capacity import budgeted_layers, recall_slot_entries

ENDING_TOKENS = 32  # what ends a turn, at most
MOST_EPISODES = 16  # twice what is chosen by itself
# What finds parked entries again: in bytes of the entries, and of each head whatever it holds.
FINDING, FINDING_BYTES = 2, 8192
COPIES = 2  # while a turn may be undone


def chat_need(rule: Rule, length: int, prompt: int, new_tokens: int, episodes: int) -> Need:
    """What the caches come to, at most.

    Args:
        length: of the whole text once the prompt is read.
        prompt: tokens of it that are new.
        new_tokens: the longest answer.
        episodes: caches that there are.
    """
    whole = length + new_tokens + ENDING_TOKENS
    resting = min(whole, _resting(rule))
    answering = min(whole, _answering(rule))
    device = rule.bytes_of(answering, whole, 0)
    if _copies(rule, prompt + new_tokens):
        device = _joined(device, rule.bytes_of(resting, whole, 0))
    built = rule.bytes_of(min(whole, _building(rule, length)), whole, 0)
    passing = max(device.passing, built.passing) + _scratch_bytes(rule, whole)
    nbytes = max(device.bytes, built.bytes) + _source_bytes(rule, whole)
    return Need(nbytes, passing, _host_bytes(rule, whole, resting, episodes))


def _resting(rule: Rule) -> int:
    """Entries per head of a cache between two turns."""
    return rule.tokens + _slots(rule) + _slack(rule)


def _slots(rule: Rule) -> int:
    return recall_slot_entries(rule.policy, rule.desk.decoder.spec) + rule.policy.lag


def _slack(rule: Rule) -> int:
    excess = rule.policy.timing.excess()
    return 0 if excess is None else excess + GROWTH_TOKENS


def _answering(rule: Rule) -> int:
    """Entries per head of a cache that answers, slots for pages included."""
    return rule.tokens + 2 * _slots(rule) + rule.block + GROWTH_TOKENS


def _building(rule: Rule, length: int) -> int:
    """Entries per head of a cache that is read anew."""
    if isinstance(rule.policy.schedule, Whole):
        return length
    return rule.tokens + _slots(rule) + rule.block + GROWTH_TOKENS


def _copies(rule: Rule, tokens: int) -> bool:
    """Whether a turn of so many tokens has a second cache on the device: a copy, or a new
    episode's."""
    is_single = isinstance(rule.policy.session, Single)
    return rule.tends or not is_single or tokens + ENDING_TOKENS > rule.block


def _joined(one: Need, other: Need) -> Need:
    return Need(one.bytes + other.bytes, max(one.passing, other.passing))


def _scratch_bytes(rule: Rule, length: int) -> int:
    """Keys and values of a layer that are read behind a cache to judge all of it at once."""
    if not isinstance(rule.policy.schedule, Whole):
        return 0
    spec = rule.desk.decoder.spec
    largest = max(layer.bytes_per_token(spec.dtype) for layer in spec.layers)
    return largest * (length + PIECE_TOKENS)


def _source_bytes(rule: Rule, length: int) -> int:
    """What stands for tokens whose keys and values are rebuilt, and a layer of it twice."""
    rebuilding, spec = rule.policy.rebuilding, rule.desk.decoder.spec
    if rebuilding is None:
        return 0
    layers = len(spec.layers) + 1 if rebuilding.manner is RecomputeSource.EVERY else 2
    heads = sum(layer.kv_heads for layer in spec.layers)
    row = max(spec.width, 1) * spec.dtype.itemsize * layers + 2 * heads * 8
    return length * row * COPIES


def _host_bytes(rule: Rule, length: int, resting: int, episodes: int) -> int:
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
    return held + COPIES * (length * parked * (1 + FINDING) + heads * FINDING_BYTES)


def turn_need(rule: Rule, said: Sequence[Said], length: int, new_tokens: int) -> Need:
    """Of a turn that begins with nothing but the text, however its session is held."""
    if rule.is_chat:
        prompt = length - sum(each.tokens for each in said)
        return chat_need(rule, length, prompt, new_tokens, 0)
    return rule.need(Held(), length, new_tokens)
