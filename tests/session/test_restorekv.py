"""Entries of learned tokens beside what is kept: budget, exactness, position, later turns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import BudgetError, Mode, ModelError, SpellingError
from larder.models import BatchSegment, Decoder, wrap_model
from larder.policy import PROVIDERS
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, entries_per_head
from learned_gates import random_soft_prompt
from model_runs import id_runtime, some_ids
from tiny_models import tiny

CONTEXT, TOKENS, ADDED = 40, 24, 8
KVZIP = "whole() > protect(sinks=2, recent=4) > reconstruct() > uniform()"
RESTORE = f"{KVZIP} > restorekv()"
PROVIDER = PROVIDERS.load("restorekv")()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    held = wrap_model(tiny("qwen3"))
    held.soft_prompts.put("restorekv", random_soft_prompt(held, tokens=ADDED))
    return held


def compressed_cache(
    decoder: Decoder, sentence: str, tokens: int, ids: tuple[int, ...]
) -> SequenceCache:
    policy = Policy.parse(sentence).with_sizes(tokens, 8 if "blockwise" in sentence else None)
    prompts = [{"repeat": (5, 6)}]
    return build_caches(id_runtime(decoder), policy, ids, prompts, PeakMemoryMeter()).activate(0)


def logits_after(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> Tensor:
    return decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, range(len(ids)))


def test_full_budget_is_exact(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT + 6)
    cache = compressed_cache(decoder, RESTORE, CONTEXT, ids[:CONTEXT])
    full = compressed_cache(decoder, "whole() > unlimited()", CONTEXT, ids[:CONTEXT])
    expected = logits_after(decoder, full, ids[CONTEXT:])
    torch.testing.assert_close(
        logits_after(decoder, cache, ids[CONTEXT:]), expected, atol=1e-4, rtol=0
    )
    evicting = compressed_cache(decoder, RESTORE, CONTEXT - 1, ids[:CONTEXT])
    assert not torch.allclose(logits_after(decoder, evicting, ids[CONTEXT:]), expected, atol=1e-4)


def test_added_entries_equal_a_forward_pass_over_the_full_cache(decoder: Decoder) -> None:
    ids, wanted = some_ids(CONTEXT), dict[int, tuple[Tensor, Tensor]]()
    full = compressed_cache(decoder, "whole() > unlimited()", CONTEXT, ids)
    with decoder.soft_prompts.soft_pass("restorekv", PROVIDER):
        decoder.read(
            [BatchSegment(full, (0,) * ADDED, shift=-ADDED)],
            Mode.SCRATCH,
            lambda row, layer, own: wanted.update({layer: (own.keys, own.values)}),
        )
    cache, bare = (
        compressed_cache(decoder, *own, ids) for own in ((RESTORE, TOKENS), (KVZIP, TOKENS - 8))
    )
    for layer, (keys, values) in wanted.items():
        own, plain = cache.entries(layer), bare.entries(layer)
        for head in range(len(own.lengths)):
            torch.testing.assert_close(own.head_keys(head)[-ADDED:], keys[head])
            torch.testing.assert_close(own.head_values(head)[-ADDED:], values[head])
            torch.testing.assert_close(own.head_keys(head)[:-ADDED], plain.head_keys(head))
            assert own.head_positions(head).tolist()[-ADDED - 1 :] == [CONTEXT - 1] * (ADDED + 1)


def test_added_entries_count_in_the_budget(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT)
    assert entries_per_head(Policy.parse(RESTORE).with_sizes(TOKENS, None), decoder.spec) == 16
    cache, plain = (compressed_cache(decoder, own, TOKENS, ids) for own in (RESTORE, KVZIP))
    assert cache.lengths() == plain.lengths() and cache.nbytes == plain.nbytes
    assert cache.next_position == CONTEXT
    with pytest.raises(BudgetError, match=r"no room beside the state of restorekv\(\), which t"):
        compressed_cache(decoder, RESTORE, ADDED, ids)


def test_peak_includes_replaced_and_learned_entries(decoder: Decoder) -> None:
    ids, peaks = some_ids(200), list[int]()
    for sentence in (KVZIP, RESTORE):
        policy, meter = Policy.parse(sentence).with_sizes(TOKENS, None), PeakMemoryMeter()
        build_caches(id_runtime(decoder), policy, ids, [{"repeat": (5, 6)}], meter)
        peaks.append(meter.peak_bytes)
    assert peaks[0] < peaks[1]  # the same storage is replaced, and the learned tokens are held


def test_later_tokens_continue_positions_and_roll_back(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT + 3)
    cache = compressed_cache(decoder, RESTORE, TOKENS, ids[:CONTEXT])
    before = logits_after(decoder, cache, ids[CONTEXT:])
    decoder.read([BatchSegment(cache, ids[CONTEXT:])], Mode.APPEND)
    assert int(cache.entries(0).head_positions(0)[-1]) == CONTEXT + 2
    cache.truncate(CONTEXT)
    assert set(cache.lengths()[0]) == {TOKENS}
    torch.testing.assert_close(logits_after(decoder, cache, ids[CONTEXT:]), before)
    restored = SequenceCache.restore(decoder.spec, cache.state(), cache.meta())
    assert torch.equal(
        logits_after(decoder, restored, ids[CONTEXT:]), logits_after(decoder, cache, ids[CONTEXT:])
    )


def test_blocks_stay_within_the_budget(decoder: Decoder) -> None:
    sentence = RESTORE.replace("whole()", "blockwise()")
    cache = compressed_cache(decoder, sentence, TOKENS, some_ids(CONTEXT))
    assert set(cache.lengths()[0]) == {TOKENS}


def test_added_entries_are_exact_beside_quantized_ones(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT)
    cache = compressed_cache(decoder, f"{RESTORE} > quantized(bits=4, group=8)", TOKENS, ids)
    exact = compressed_cache(decoder, RESTORE, TOKENS, ids)
    held, added = cache.entries(1).head_keys(0), exact.entries(1).head_keys(0)[-ADDED:]
    assert bool((held == added[:, None]).all(2).any(1).all()) and cache.nbytes <= exact.nbytes
    assert cache.managed_entries > exact.managed_entries


def test_unsupported_policies_are_refused(decoder: Decoder) -> None:
    with pytest.raises(SpellingError, match=r"take reconstruct\(\), or drop"):
        Policy.parse("whole() > keydiff() > uniform() > restorekv()")
    with pytest.raises(SpellingError, match="cannot hold beside its own"):
        Policy.parse(f"{RESTORE} > transform()")
    with pytest.raises(ModelError, match="larder train restorekv"):
        compressed_cache(wrap_model(tiny("llama")), RESTORE, TOKENS, some_ids(CONTEXT))
