"""Synthetic caches with the size of those of a long text, for measurements of decode steps.

Caches at full precision in one tier are filled with random numbers at once. All other caches take
synthetic keys block by block, observed by their policy, so that codes, pages and indexes are
realistic; caches with an index get queries that search for some of these keys.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from larder.cache import SequenceCache
from larder.core import Calibration, LayerSpec, Ledger, Prompts, UsageError, spell
from larder.models import MEASUREMENTS, Decoder
from larder.policy import WITHOUT_LIMIT, Exact
from larder.prefill import PeakMemoryMeter
from larder.session import ModelRuntime, Policy, build_caches, entries_per_head
from larder_bench.profiling.synthetic_keys import KeyQueryStream, draw_stream
from larder_bench.profiling.timed_decoder import SyntheticDecoder

STEPS_PER_TARGET = 4  # steps with the same search target
PROMPT_TOKENS = 64  # of each prompt that a policy scores by
EPISODE_TOKENS = 400
FIRST_TOKEN_ID, WORDS = 6, 4096
EMPTY_LEDGER = Ledger()


@dataclass(frozen=True)
class SyntheticCache:
    """Cache, and the streams that its layers get during decoding; empty for most."""

    cache: SequenceCache
    streams: Sequence[KeyQueryStream] = ()

    @property
    def fast_bytes(self) -> int:
        """Bytes in the model's memory, slots for recalled pages included even if still empty."""
        foreseen = sum(tier.foreseen_bytes for tier in self.cache.tiers)
        return self.cache.device_nbytes + foreseen

    @property
    def slow_bytes(self) -> int:
        """Bytes in host memory: offloaded entries and their index."""
        return self.cache.nbytes - self.cache.device_nbytes


def build_synthetic_cache(
    runtime: ModelRuntime, policy: Policy, context: int, steps: int
) -> SyntheticCache:
    """Cache of a policy with set sizes, after `context` tokens.

    Args:
        steps: number of decode steps that will follow.

    Raises:
        UsageError: the policy restores evicted entries by reading their text again.
        LarderError: the policy refuses its budget.
    """
    if policy.rebuilding is not None:
        raise UsageError(
            f"{spell(policy.compensation)} recomputes entries from their text, but there is none: "
            "leave it out, or measure answers."
        )
    if policy.storage == Exact() and policy.recall is None:
        return SyntheticCache(_random_cache_of(runtime.decoder, policy, context))
    layers = runtime.decoder.spec.layers
    streams = [draw_stream(layer, context, steps, STEPS_PER_TARGET) for layer in layers]
    decoder = SyntheticDecoder(runtime.decoder, streams)
    ids, prompts = random_ids(runtime.decoder, context), random_prompts(runtime.decoder, policy)
    cache = build_caches(
        replace_decoder(runtime, decoder), policy, ids, [prompts], PeakMemoryMeter()
    ).activate(0)
    if policy.recall is None:
        return SyntheticCache(cache)
    return SyntheticCache(cache, [replace(one, keys=one.keys[:, :0].clone()) for one in streams])


def append_random_entries(decoder: Decoder, caches: Sequence[SequenceCache], tokens: int) -> None:
    """Append random entries to caches, as if `tokens` tokens had been generated."""
    spec = decoder.spec
    for cache in caches:
        start = cache.next_position
        cache.allocate(tokens)
        positions = torch.arange(start, start + tokens, device=spec.device)
        for layer in spec.layers:
            both = torch.randn(2, layer.kv_heads, tokens, layer.head_dim)
            keys, values = both.to(spec.dtype).to(spec.device)
            cache.layers[layer.index].append(keys, values, positions)
        cache.advance(tokens)


def random_ids(decoder: Decoder, count: int) -> tuple[int, ...]:
    """Random token ids, the same every time, that the bundled tokenizer has, too."""
    source, words = random.Random(0), min(decoder.vocab_size, WORDS)
    return tuple(source.randrange(FIRST_TOKEN_ID, words) for _ in range(count))


def replace_decoder(runtime: ModelRuntime, decoder: Decoder) -> ModelRuntime:
    """Runtime with another decoder, and with random measurements: those of random weights would be
    meaningless and take long.
    """
    layers = runtime.decoder.spec.managed

    def calibrate(names: frozenset[str]) -> Calibration:
        source = random.Random(0)
        grains = {name: MEASUREMENTS.load(name).granularity for name in sorted(names)}
        counts = {name: sum(map(grain.count, layers)) for name, grain in grains.items()}
        return {name: tuple(source.random() for _ in range(n)) for name, n in counts.items()}

    return replace(runtime, decoder=decoder, calibrate=calibrate)


def random_prompts(decoder: Decoder, policy: Policy) -> Prompts:
    """Prompts of random tokens for everything that a policy scores by; episodes are the longest."""
    sizes = {name: PROMPT_TOKENS for name in policy.scorer.required_prompts()}
    sizes |= {"episode": EPISODE_TOKENS} if "episode" in sizes else {}
    return {name: random_ids(decoder, size) for name, size in sizes.items()}


def _random_cache_of(decoder: Decoder, policy: Policy, context: int) -> SequenceCache:
    is_full = policy.budget.tokens == WITHOUT_LIMIT
    form = "dense" if is_full else "ragged"
    entries = context if is_full else min(context, entries_per_head(policy, decoder.spec))
    return random_cache(decoder, form, entries, policy.planner.ledger, 0.0, context)


def random_cache(
    decoder: Decoder,
    form: str,
    entries: int,
    ledger: Ledger = EMPTY_LEDGER,
    spread: float = 1.0,
    context: int | None = None,
) -> SequenceCache:
    """Cache with random entries; ragged heads hold half to one and a half of `entries` each, layers
    with a sliding window all of it.

    With a spread of 0 all heads have the same length. Columns of the ledger hold random numbers,
    scalars are unset.

    Args:
        context: number of tokens read. The later half of a head's entries are the latest of them,
            the others are spread evenly before. None for twice the entries, which are the first.
    """
    spec, state = decoder.spec, dict[str, torch.Tensor]()
    read = context or 2 * entries
    for layer in spec.layers:
        heads, size, name = layer.kv_heads, layer.head_dim, layer.index
        if layer.sliding_window is not None:
            state |= _window_state(layer, read, spec.dtype)
            continue
        lengths = torch.full((heads,), entries)
        if form == "ragged":
            reach = round(spread * entries / 2)
            lengths += torch.linspace(-reach, reach, heads).long()
            state[f"{name}.lengths"] = lengths
        total = int(lengths.sum())
        shape = (total, size) if form == "ragged" else (heads, entries, size)
        state[f"{name}.keys"] = torch.randn(shape).to(spec.dtype)
        state[f"{name}.values"] = torch.randn(shape).to(spec.dtype)
        kept = ledger_for(form, ledger)
        state |= {f"{name}.column.{column}": torch.rand(total) for column in kept.columns}
        unset = torch.full((heads,), torch.nan)
        state |= {f"{name}.scalar.{scalar}": unset.clone() for scalar in kept.scalars}
        indices = [_positions(n, context) for n in lengths.tolist()]
        state[f"{name}.positions"] = torch.cat(indices if form == "ragged" else indices[:1])
    meta = SequenceCache(spec, form, ledger_for(form, ledger)).meta()
    meta |= {"next_position": str(read)}
    cache = SequenceCache.restore(spec, {n: t.to(spec.device) for n, t in state.items()}, meta)
    cache.reserve(64)
    return cache


def _window_state(layer: LayerSpec, read: int, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Random entries of the last tokens of a layer with a sliding window."""
    assert layer.sliding_window is not None
    held = min(layer.sliding_window, read)
    shape = layer.kv_heads, held, layer.head_dim
    return {
        f"{layer.index}.keys": torch.randn(shape).to(dtype),
        f"{layer.index}.values": torch.randn(shape).to(dtype),
        f"{layer.index}.positions": torch.arange(read - held, read, dtype=torch.int32),
    }


def ledger_for(form: str, ledger: Ledger) -> Ledger:
    """Ledger of a cache form: only ragged caches have one."""
    return ledger if form == "ragged" else EMPTY_LEDGER


def _positions(entries: int, context: int | None) -> torch.Tensor:
    """True positions of a head's entries."""
    if context is None:
        return torch.arange(entries, dtype=torch.int32)
    latest = entries // 2
    early = torch.arange(entries - latest) * (context - latest) // max(entries - latest, 1)
    return torch.cat([early, torch.arange(context - latest, context)]).to(torch.int32)
