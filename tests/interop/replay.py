"""Reference of generation over a LarderCache: the same tokens read through a decoder, row by row.

Texts go through the policy's prefill schedule, generated tokens one by one under its timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, wrap_model
from larder.prefill import PeakMemoryMeter, PrefillSequence, no_progress
from larder.session import (
    ModelRuntime,
    Policy,
    TokenizerAdapter,
    decode_planner,
    empty_cache,
    entries_per_head,
    prefill_reader,
    resolve_budget,
)
from model_runs import no_embedder
from tiny_models import tiny

Ids = Sequence[int]


@dataclass
class Replay:
    """Cache of one row, and the tokens that the model would say next behind each step."""

    cache: SequenceCache
    generated: list[int] = field(default_factory=list[int])


@cache
def decoder_of(architecture: str) -> Decoder:
    """Decoder around a tiny model of its own."""
    return wrap_model(tiny(architecture))


def replay(decoder: Decoder, policy: str, budget: Any, turns: Sequence[tuple[Ids, Ids]]) -> Replay:
    """Read turns, each a text and the generated tokens that were fed behind it."""
    runtime = ModelRuntime(decoder, NoTokenizer(), no_embedder, lambda names: {})
    parsed, spec = Policy.parse(policy), decoder.spec
    first = len(turns[0][0])
    sized = parsed.with_sizes(resolve_budget(parsed, budget, first, spec), None)
    out = Replay(empty_cache(sized, spec))
    held = out.cache
    for number, (text, generated) in enumerate(turns):
        length = held.next_position + len(text)
        context = max(length, entries_per_head(sized, spec)) if number else length
        reader = prefill_reader(runtime, sized, context, PeakMemoryMeter())
        sized.schedule.read(reader, [PrefillSequence(held, {})], tuple(text), no_progress)
        eviction = decode_planner(runtime, sized, [held])
        for step, token in enumerate(generated, start=1):
            segment = BatchSegment(held, (token,))
            observer = eviction.observer([0], [segment], [step]) if eviction else None
            logits = decoder.forward_logits([segment], Mode.APPEND, [0], observer)
            out.generated.append(int(logits.argmax()))
    return out


def entries(cache: SequenceCache) -> list[tuple[Tensor, Tensor]]:
    """Positions and keys of the entries of each layer, head by head."""
    found = [cache.entries(layer.index) for layer in cache.spec.layers]
    return [(each.packed_positions(), each.pack(each.keys)) for each in found]


def assert_same_entries(cache: SequenceCache, expected: SequenceCache) -> None:
    assert cache.next_position == expected.next_position
    assert cache.lengths() == expected.lengths()
    for (positions, keys), (other_places, other_keys) in zip(
        entries(cache), entries(expected), strict=True
    ):
        assert torch.equal(positions, other_places)
        torch.testing.assert_close(keys, other_keys, atol=1e-4, rtol=1e-4)


class NoTokenizer(TokenizerAdapter):
    """Tokenizer of policies that look at no words."""

    def __init__(self) -> None:
        pass

    def lexicon(self, names: Any) -> dict[str, Any]:
        assert not names
        return {}
