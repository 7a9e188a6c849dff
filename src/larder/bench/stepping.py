"""Caches as they are behind a long text that nobody has read, and steps of decoding over them.

What is held at full precision in one tier is filled with random numbers at once. All other caches
take made-up keys in block by block, under the eyes of their policy, so that codes, pages and
indexes are what they would be; queries that look for some of them are fed to those that search.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from larder.bench.filling import filled
from larder.bench.streams import Stream, stream
from larder.bench.watching import Stuffing
from larder.cache.sequence import Form, SequenceCache
from larder.core.errors import UsageError
from larder.core.observation import Calibration, Prompts
from larder.core.spelling import spell
from larder.models.calibration import MEASUREMENTS
from larder.models.decoder import Decoder
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.policy.storage.exact import Exact
from larder.prefill.meter import Meter
from larder.session.policy import Policy
from larder.session.reading import Desk, build
from larder.session.rooms import entries_of

STAYS = 4  # steps that a query looks for the same
PROMPT_TOKENS = 64  # of every prompt that a policy judges by
EPISODE_TOKENS = 400
FIRST_WORD, WORDS = 6, 4096


@dataclass(frozen=True)
class Stuffed:
    """A cache, and what its layers are fed with while it is decoded over; nothing for most."""

    cache: SequenceCache
    streams: Sequence[Stream] = ()

    @property
    def fast_bytes(self) -> int:
        """In the model's memory, slots for recalled pages included even if none is there yet."""
        foreseen = sum(tier.foreseen_bytes for tier in self.cache.tiers)
        return self.cache.fast_nbytes + foreseen

    @property
    def slow_bytes(self) -> int:
        """In host memory: what was parked, and the index over it."""
        return self.cache.nbytes - self.cache.fast_nbytes


def stuffed(desk: Desk, policy: Policy, context: int, steps: int) -> Stuffed:
    """The cache of a policy whose sizes are filled in, behind `context` tokens.

    Args:
        steps: that will be taken over it.

    Raises:
        UsageError: what it drops comes back by reading text.
        LarderError: it refuses its budget.
    """
    if policy.rebuilding is not None:
        raise UsageError(
            f"{spell(policy.compensation)} makes entries anew from what was read, and nothing was: "
            "leave it out, or measure answers."
        )
    if policy.storage == Exact() and policy.recall is None:
        return Stuffed(_at_once(desk.decoder, policy, context))
    layers = desk.decoder.spec.layers
    streams = [stream(layer, context, steps, STAYS) for layer in layers]
    stuffing = Stuffing(desk.decoder, streams)
    ids, book = random_ids(desk.decoder, context), book_for(desk.decoder, policy)
    cache = build(at_this(desk, stuffing), policy, ids, [book], Meter()).activate(0)
    if policy.recall is None:
        return Stuffed(cache)
    return Stuffed(cache, [replace(one, keys=one.keys[:, :0].clone()) for one in streams])


def pile(decoder: Decoder, caches: Sequence[SequenceCache], tokens: int) -> None:
    """Have caches hold so many more random entries, as if these had been generated."""
    spec = decoder.spec
    for cache in caches:
        start = cache.next_position
        cache.allocate(tokens)
        positions = torch.arange(start, start + tokens, device=spec.device)
        for layer in spec.layers:
            both = torch.randn(2, layer.kv_heads, tokens, layer.head_dim)
            keys, values = both.to(spec.dtype).to(spec.device)
            cache.stores[layer.index].append(keys, values, positions)
        cache.advance(tokens)


def random_ids(decoder: Decoder, count: int) -> tuple[int, ...]:
    """Tokens by chance, the same every time, out of those that the bundled tokenizer has, too."""
    source, words = random.Random(0), min(decoder.vocabulary, WORDS)
    return tuple(source.randrange(FIRST_WORD, words) for _ in range(count))


def at_this(desk: Desk, decoder: Decoder) -> Desk:
    """A desk with something in the place of its decoder, and measurements by chance: those of
    random weights would say no more, and take long.
    """
    layers = desk.decoder.spec.managed

    def measured(names: frozenset[str]) -> Calibration:
        source = random.Random(0)
        grains = {name: MEASUREMENTS.load(name).grain for name in sorted(names)}
        counts = {name: sum(map(grain.count, layers)) for name, grain in grains.items()}
        return {name: tuple(source.random() for _ in range(n)) for name, n in counts.items()}

    return replace(desk, decoder=decoder, calibrate=measured)


def book_for(decoder: Decoder, policy: Policy) -> Prompts:
    """All prompts that a policy judges by, of random tokens: episodes are the longest."""
    sizes = {name: PROMPT_TOKENS for name in policy.scorer.wanted()}
    sizes |= {"episode": EPISODE_TOKENS} if "episode" in sizes else {}
    return {name: random_ids(decoder, size) for name, size in sizes.items()}


def _at_once(decoder: Decoder, policy: Policy, context: int) -> SequenceCache:
    is_full = policy.budget.tokens == WITHOUT_LIMIT
    form = Form.DENSE if is_full else Form.RAGGED
    entries = context if is_full else min(context, entries_of(policy, decoder.spec))
    return filled(decoder, form, entries, policy.planner.ledger, 0.0, context)
