"""Schedules agree where they must, are exact where they can be, and leave nothing behind."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch

from covering import covering, one_in
from larder import Policy
from larder.cache import SequenceCache
from larder.core import BadParameter, BudgetError, Mode
from larder.models import wrap_model
from larder.policy import Drop, Planner, Pooled, Protect, ProtectedTokens, SnapKV
from larder.prefill import Blockwise, Episodic, Together, Whole, no_progress, split_blocks
from larder.prefill.schedules import whole as whole_module
from larder.session import PRESETS
from model_runs import native_logits, read_and_evict, read_on, some_ids
from tiny_models import ARCHITECTURES, WINDOW_TOKENS, tiny

SCHEDULES = {"whole": Whole(), "blockwise": Blockwise(9), "episodic": Episodic(9, Together.ALL)}
SENTENCES = [
    'patched(prompt="episode") > sensitivity()',
    "reconstruct(chunk=8) > global()",
    "snapkv(window=4) > pooled()",
    'snapkv(window=4, variant="code") > pooled()',
    "keydiff() > uniform()",
    "lookahead(tokens=3) > pooled()",
    "novelty() > uniform()",
]


# Presets that hold entries in fewer bits, without channels, or layers together, at any budget.
LOSSY_AT_ANY_BUDGET = {
    *("kivi", "kivi_blockwise", "mikv", "qaq", "think", "minicache", "minicache_quantized"),
}


def planner_of(sentence: str):
    parts = (
        sentence if sentence.startswith("protect") else f"protect(sinks=1, recent=2) > {sentence}"
    )
    return Policy.parse(parts).planner


def positions(cache: SequenceCache) -> list[list[int]]:
    layers = [cache.entries(layer.index) for layer in cache.spec.managed]
    return [e.head_positions(h).tolist() for e in layers for h in range(len(e.lengths))]


def assert_same(left: SequenceCache, right: SequenceCache, within: float = 1e-4) -> None:
    assert positions(left) == positions(right)
    assert left.meta() == right.meta()
    one, two = left.state(), right.state()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=within, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("sentence", SENTENCES)
def test_blockwise_and_episodic_build_the_same_caches(
    watched, reader_for, lane_for, sentence
) -> None:
    built = []
    for schedule in (Blockwise(9), Episodic(9, Together.ALL)):
        planner = planner_of(sentence)
        books = [some_ids(3 + n, seed=n) for n in range(3)]
        lanes = [lane_for(watched, planner, episode=ids) for ids in books]
        reader = reader_for(watched, planner, 14, 50)
        schedule.read(reader, lanes, some_ids(50), no_progress)
        built.append(lanes)
    for one, other in zip(*built, strict=True):
        assert_same(one.cache, other.cache)
    if "patched" in sentence:  # the prompts do decide
        assert positions(built[0][0].cache) != positions(built[0][1].cache)


@pytest.mark.parametrize("architecture, schedule", covering(ARCHITECTURES, SCHEDULES))
def test_full_budget_is_exact(architecture, schedule, adopted, own, reader_for, lane_for) -> None:
    ids = some_ids(61)
    decoder, expected = adopted(architecture), native_logits(own(architecture), ids)
    for sentence in ('patched(prompt="episode") > sensitivity()', "snapkv(window=4) > global()"):
        reader, lane = reader_for(decoder, planner_of(sentence), 45, 45), lane_for(decoder)
        SCHEDULES[schedule].read(reader, [lane], ids[:45], no_progress)
        got = read_on(decoder, lane.cache, ids[45:], 1)
        assert (got - expected[45:]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def own() -> Any:
    return cache(partial(tiny, layers=3))


@pytest.fixture(scope="module")
def adopted() -> Any:
    return cache(lambda architecture: wrap_model(tiny(architecture, layers=3)))


@pytest.fixture(params=["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"])
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("sentence", SENTENCES)
def test_whole_prefill_is_independent_of_its_blocks(
    watched, reader_for, lane_for, true_entries, monkeypatch, sentence
) -> None:
    caches = []
    for piece in (11, 1024):
        monkeypatch.setattr(whole_module, "BLOCK_TOKENS", piece)
        planner = planner_of(sentence)
        lane, reader = lane_for(watched, planner), reader_for(watched, planner, 14, 50)
        watched.appended.clear()
        Whole().read(reader, [lane], some_ids(50), no_progress)
        true_entries(watched, lane.cache)
        assert lane.cache.managed_entries == 14 * 2 * 3
        assert lane.cache.next_position == 50
        caches.append(lane.cache)
    assert_same(*caches)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_scratch_pass_changes_the_cache_by_its_plan_only(
    watched, reader_for, lane_for, monkeypatch, sentence
) -> None:
    """With plans held back, a whole settlement leaves exactly what appending leaves."""
    planner = planner_of(sentence)
    lane, plain = lane_for(watched, planner), lane_for(watched, planner)
    reader = reader_for(watched, planner, 8, 20)
    reader.append([plain], some_ids(20))
    monkeypatch.setattr(SequenceCache, "apply", lambda self, layer, plan: None)
    read_and_evict(reader, [lane], some_ids(20), some_ids(20), 0)
    one, two = lane.cache.state(), plain.cache.state()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert lane.cache.meta() == plain.cache.meta()


@pytest.mark.parametrize("sentence", SENTENCES)
def test_interleaved_conversations_are_independent(watched, reader_for, lane_for, sentence) -> None:
    planner = planner_of(sentence)
    first, second = some_ids(40, seed=1), some_ids(40, seed=2)
    alone, mixed, other = (lane_for(watched, planner) for _ in range(3))
    reader = reader_for(watched, planner, 14, 40)
    before = copy.deepcopy(planner)
    Blockwise(8).read(reader, [alone], first, no_progress)
    for one, two in zip(split_blocks(first, 8), split_blocks(second, 8), strict=True):
        read_and_evict(reader, [mixed], one, one, mixed.cache.next_position)
        read_and_evict(reader, [other], two, two, other.cache.next_position)
    mixed.cache.compact()
    assert_same(alone.cache, mixed.cache, 0)
    assert positions(other.cache) != positions(mixed.cache)
    assert planner == before


@pytest.mark.parametrize("total, size", [(17, 16), (40, 8), (5, 9), (100, 33), (1, 1), (0, 4)])
def test_blocks_are_of_nearly_equal_length(total, size) -> None:
    ids = some_ids(total)
    parts = split_blocks(ids, size)
    assert sum(parts, ()) == ids
    assert len(parts) == -(-total // size)
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert not lengths or max(lengths) <= size and max(lengths) - min(lengths) <= 1


class Voters(SnapKV):
    """SnapKV that says how many voters it keeps."""

    def protected_tokens(self) -> ProtectedTokens:
        return ProtectedTokens(last=self.window)


def test_scorer_needing_more_than_a_block_is_supported(
    watched, reader_for, lane_for, monkeypatch
) -> None:
    planner = Planner(Protect(1, 2), Voters(window=20), Pooled(), Drop())
    caches = []
    for piece in (11, 1024):
        monkeypatch.setattr(whole_module, "BLOCK_TOKENS", piece)
        lane, reader = lane_for(watched), reader_for(watched, planner, 25, 60)
        Whole().read(reader, [lane], some_ids(60), no_progress)
        caches.append(lane.cache)
    assert_same(*caches)


def test_short_last_chunk_does_not_outrank_the_others(watched, reader_for, lane_for) -> None:
    planner = planner_of("protect(sinks=0, recent=0) > reconstruct(chunk=32) > global()")
    reader, lane = reader_for(watched, planner, 26, 130), lane_for(watched)
    Whole().read(reader, [lane], some_ids(130), no_progress)
    kept = [position for head in positions(lane.cache) for position in head]
    assert sum(position >= 128 for position in kept) < 0.9 * 2 * len(positions(lane.cache))


def test_whole_prefill_keeps_sliding_windows_bounded(reader_for, lane_for, monkeypatch) -> None:
    monkeypatch.setattr(whole_module, "BLOCK_TOKENS", 16)
    decoder = wrap_model(tiny("gemma3", layers=4))
    reader = reader_for(decoder, planner_of("snapkv(window=4) > unlimited()"), 1 << 62, 200)
    lane, widest = lane_for(decoder), []
    attend = SequenceCache.attend

    def spy(self, layer, *rest):
        out = attend(self, layer, *rest)
        widest.append(max(self.lengths()[0]))
        return out

    monkeypatch.setattr(SequenceCache, "attend", spy)
    Whole().read(reader, [lane], some_ids(200), no_progress)
    assert max(widest) <= WINDOW_TOKENS + 16
    handed_over = lane.cache.largest_layer_bytes  # is held twice
    assert reader.meter.peak_bytes - handed_over < 1.2 * decoder.spec.full_bytes(200)


def test_later_tokens_have_true_positions(watched, reader_for, lane_for) -> None:
    """Dropped entries do not move later ones: kept entries have the positions of the full cache."""
    reader = reader_for(watched, planner_of("keydiff() > uniform()"), 14, 40)
    lane = lane_for(watched)
    Blockwise(8).read(reader, [lane], some_ids(40), no_progress)
    result = []
    from larder.models import BatchSegment

    watched.read(
        [BatchSegment(lane.cache, (7, 8))], Mode.SCRATCH, lambda r, layer, rec: result.append(rec)
    )
    assert all(rec.positions.tolist() == [40, 41] for rec in result)


def test_progress_reaches_the_end(watched, reader_for, lane_for) -> None:
    for schedule in SCHEDULES.values():
        steps: list[tuple[int, int]] = []
        lanes = [lane_for(watched) for _ in range(2)]
        reader = reader_for(watched, planner_of("keydiff() > uniform()"), 14, 40)
        schedule.read(
            reader, lanes, some_ids(40), lambda *step, reported=steps: reported.append(step)
        )
        assert steps == sorted(set(steps))
        assert steps[-1] == (80, 80)


# Lanes have no calibrated transforms, which `larder` needs (tests/cache/test_transform.py).
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"larder"}))
def test_every_preset_prefills_within_its_budget(watched, reader_for, lane_for, preset) -> None:
    policy = Policy.parse(preset)
    room = 50 if policy.recall is None else 200  # for what always stays, and a page of any size
    tokens = room if policy.budget.tokens is None else policy.budget.tokens
    reader = reader_for(watched, policy.planner, tokens, 60)
    lane = lane_for(watched, policy.planner)
    policy.with_sizes(tokens, None).schedule.read(reader, [lane], some_ids(60), no_progress)
    most = min(tokens, 60) * 2 * 3
    if preset in ("subgen", "shotkv"):  # samples may coincide, and units may not fit
        assert 0 < lane.cache.managed_entries <= most
    else:
        assert lane.cache.managed_entries == most


@pytest.mark.parametrize(
    "preset", one_in(6, sorted(PRESETS.keys() - {"larder"} - LOSSY_AT_ANY_BUDGET))
)
def test_every_preset_with_a_full_budget_equals_the_model(
    watched, reader_for, lane_for, preset
) -> None:
    """Nothing is rejected, and what follows has the model's own logits."""
    policy, ids, more = Policy.parse(preset), some_ids(60), some_ids(4, seed=8)
    tokens = 400 if policy.budget.tokens is None else policy.budget.tokens
    reader, lane = (
        reader_for(watched, policy.planner, tokens, 60),
        lane_for(watched, policy.planner),
    )
    policy.with_sizes(tokens, None, 60).schedule.read(reader, [lane], ids, no_progress)
    assert lane.cache.managed_entries == 60 * 2 * 3
    expected = native_logits(tiny("qwen3", layers=3), (*ids, *more))[-len(more) :]
    torch.testing.assert_close(read_on(watched, lane.cache, more, 4), expected, atol=1e-3, rtol=0)


def test_invalid_sizes_are_refused(watched, reader_for) -> None:
    for kind in (Blockwise, Episodic):
        with pytest.raises(BadParameter, match="at least 1"):
            kind(0)
    with pytest.raises(BudgetError, match="smaller than sinks"):
        reader_for(
            watched, planner_of("protect(sinks=4, recent=8) > keydiff() > uniform()"), 10, 40
        )
