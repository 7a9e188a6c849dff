"""Decode steps over transform-coded entries in one call for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from covering import covering
from larder.cache import SequenceCache, TransformLayer, state_of, tables_path
from larder.core import LOG_COUNT, Ledger, Mode, Plan, TransformSpec
from larder.models import BatchSegment, Decoder, decoder_stack
from larder.ops import c_library
from larder.ops.cpu import decode_attention, decoder_layer
from model_runs import some_ids
from tiny_models import tiny
from transforms import FINE_STEP, some_tables

FEW = 16  # rows that the kernel takes in these tests
TEXT = 40  # tokens that are read before the first step

pytestmark = pytest.mark.skipif(
    not hasattr(c_library(), "larder_attend_coded"), reason="no C library, or an older one"
)


@pytest.fixture(autouse=True)
def kernel_is_taken(monkeypatch):
    monkeypatch.setattr(decoder_layer, "max_rows", lambda dtype: FEW)
    monkeypatch.setattr(decoder_stack, "max_rows", lambda dtype: FEW)


def a_decoder(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(tiny("llama", dtype=dtype, head_dim=32))
    path = tables_path(decoder.spec.fingerprint, "transform")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_of({layer.index: some_tables(layer) for layer in decoder.spec.layers}), path)
    return decoder


def a_cache(decoder: Decoder, seed: int, step: float, block: int = 64) -> SequenceCache:
    """Cache of a text whose entries are coded but for the first and some of the last ones."""
    spec = TransformSpec(sinks=1, recent=2, block=block)
    cache = SequenceCache(decoder.spec, "ragged", Ledger((LOG_COUNT,)), transform=spec)
    decoder.read([BatchSegment(cache, some_ids(TEXT, seed=seed))], Mode.APPEND)
    heads = decoder.spec.layers[0].kv_heads
    grades = (torch.arange(heads * TEXT) % 5 + 1).view(heads, TEXT)
    grades[:, [0, -2, -1]] = 0
    kept = torch.arange(heads * TEXT)
    for layer in range(len(cache.layers)):
        plan = Plan(kept, (TEXT,) * heads, grades=grades.flatten().to(torch.int8), step=step)
        cache.apply(layer, plan)
    return cache


def steps(decoder: Decoder, caches: Sequence[SequenceCache], count: int) -> list[Tensor]:
    """Logits of some steps over all caches."""
    return [
        decoder.forward_logits(
            [BatchSegment(cache, (token + n,)) for n, cache in enumerate(caches)],
            Mode.APPEND,
            list(range(len(caches))),
        )
        for token in range(5, 5 + count)
    ]


def with_layers_alone(monkeypatch) -> None:
    """Have every layer decode and attend in a call of its own."""
    monkeypatch.setattr(TransformLayer, "step_storage", lambda self: None)


@pytest.mark.parametrize(
    "dtype, rows, is_fused", covering([torch.bfloat16, torch.float32], [1, 3], [True, False])
)
def test_step_in_one_call_equals_calls_of_layers_bitwise(monkeypatch, dtype, rows, is_fused):
    decoder, calls = a_decoder(dtype), list[int]()
    if not is_fused:
        monkeypatch.setattr(decoder_layer, "can_step", lambda *_: False)
    addresses = decode_attention._addresses
    monkeypatch.setattr(
        decode_attention,
        "_addresses",
        lambda own: calls.append(sum(map(bool, own))) or addresses(own),
    )
    whole = steps(decoder, [a_cache(decoder, seed, 0.1) for seed in range(rows)], 3)
    assert sum(calls) == 3 * rows * len(decoder.spec.layers)
    with_layers_alone(monkeypatch)
    alone = steps(decoder, [a_cache(decoder, seed, 0.1) for seed in range(rows)], 3)
    assert sum(calls) == 3 * rows * len(decoder.spec.layers)
    assert all(map(torch.equal, whole, alone))


def test_coded_and_full_caches_step_beside_each_other_as_alone():
    decoder = a_decoder(torch.float32)

    def caches() -> list[SequenceCache]:
        full = SequenceCache(decoder.spec, "ragged")
        decoder.read([BatchSegment(full, some_ids(20, seed=7))], Mode.APPEND)
        return [a_cache(decoder, 0, 0.1), full, a_cache(decoder, 1, 0.1).fork()]

    [together] = steps(decoder, caches(), 1)
    for n, cache in enumerate(caches()):
        segment = BatchSegment(cache, (5 + n,))
        alone = decoder.forward_logits([segment], Mode.APPEND, [0])
        assert torch.equal(alone[0], together[n])


def test_counts_of_merged_entries_weigh_in_a_step():
    decoder = a_decoder(torch.float32)
    plain, weighed = a_cache(decoder, 0, 0.1), a_cache(decoder, 0, 0.1)
    for layer, store in enumerate(weighed.layers):
        counts = torch.zeros(sum(store.lengths))
        counts[TEXT // 2] = 3.0
        weighed.write_columns(layer, {LOG_COUNT: counts})
    [found], [other] = (steps(decoder, [cache.fork()], 1) for cache in (weighed, plain))
    assert not torch.allclose(found, other, atol=1e-4)


def test_steps_code_what_they_leave_behind(monkeypatch):
    decoder = a_decoder(torch.float32)
    cache, twin = (a_cache(decoder, 0, FINE_STEP, block=4) for _ in range(2))
    found, most = list[Tensor](), 0
    for _ in range(12):
        found += steps(decoder, [cache], 1)
        most = max(most, *(max(store.full_precision_lengths) for store in cache.layers))
    spec = cache.layers[0].tier.spec
    assert most < spec.sinks + spec.recent + spec.block + 1
    assert all(store.lengths == (TEXT + 12,) * 2 for store in cache.layers)
    with_layers_alone(monkeypatch)
    for logits in found:
        [other] = steps(decoder, [twin], 1)
        torch.testing.assert_close(logits, other, rtol=1e-3, atol=1e-3)


def test_later_changes_of_a_tier_are_attended_to():
    decoder = a_decoder(torch.float32)
    cache = a_cache(decoder, 0, 0.1)
    before = steps(decoder, [cache.fork()], 1)[0]
    layer = cache.layers[0]
    held, grades = sum(layer.lengths), layer.entries().grades
    kept = torch.tensor([n for n in range(held) if n % 7 != 3])
    lengths = tuple(int(((kept // TEXT) == head).sum()) for head in range(2))
    cache.apply(0, replace(Plan(kept, lengths), grades=grades[kept]))
    after = steps(decoder, [cache.fork()], 1)[0]
    assert not torch.allclose(before, after, atol=1e-4)
