"""Contract of every scorer, and the loop that each must equal."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, a_view, some_columns, some_entries
from larder.core import LOG_COUNT, Entries, Observation, Variant, public_name
from larder.policy import Patched, Reconstruct

# Old entries of each head, and how many tokens the newest block adds to all of them.
CASES = {
    "uneven": ([[0, 1, 4, 5, 9], [2, 3, 8], [0, 5, 6, 7]], 4),
    "one_head": ([[0, 2, 3, 7]], 3),
    "first_block": ([[], []], 6),
    "head_of_old_ones_only_in_the_other": ([[], [0, 1, 2, 3, 4]], 2),
}
LAYOUT = (0, 4), (4, 4)  # two heads of four entries
PAPER = re.compile(r"\(20\d\d\),\s+arXiv:\d{4}\.\d{5}|[Nn]o paper")


def view(case: str, group: int = 2, layer: int = 1) -> Observation:
    old, block = CASES[case]
    first = 1 + max((p for head in old for p in head), default=-1)
    heads = [[*head, *range(first, first + block)] for head in old]
    return a_view(a_layer(len(heads), group, index=layer), heads, block)


def judged(scorer, observation: Observation) -> list[list[float]]:
    scores = scorer.score(observation)
    assert scores.dtype is torch.float32
    assert scores.shape == (sum(observation.entries.lengths),)
    return [part.tolist() for part in scores.split(observation.entries.lengths)]


def assert_equal(got: list[list[float]], expected: list[list[float]], within: float) -> None:
    assert [len(head) for head in got] == [len(head) for head in expected]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=within, rel=within)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 3])
def test_scorer_equals_its_reference(scorer, loop_of, case, group) -> None:
    observation = view(case, group)
    assert_equal(judged(scorer, observation), loop_of(scorer).scores(scorer, observation), 1e-5)


@pytest.mark.parametrize("span", [(0, 3), (2, 8), (5, 100)])
def test_scorer_of_a_span_equals_its_reference(scorer, loop_of, span) -> None:
    observation = replace(view("uneven"), span=span)
    assert_equal(judged(scorer, observation), loop_of(scorer).scores(scorer, observation), 1e-5)


@pytest.mark.parametrize("variant", [{"softcap": 0.8}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
def test_scorer_with_softcap_and_sinks_equals_its_reference(scorer, loop_of, variant) -> None:
    heads = [[0, 1, 4, 9, 10, 11, 12], [2, 3, 8, 9, 10, 11, 12]]
    observation = a_view(replace(a_layer(2, 2, index=1), **variant), heads, 4)
    assert_equal(judged(scorer, observation), loop_of(scorer).scores(scorer, observation), 1e-5)


@settings(max_examples=20)
@given(
    heads=st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=3),
    block=st.integers(1, 5),
    group=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_scorers_equal_their_references_on_any_cache(
    scorer, loop_of, heads, block, group, seed
) -> None:
    old = [sorted(head) for head in heads]
    first = 1 + max((p for head in old for p in head), default=-1)
    full = [[*head, *range(first, first + block)] for head in old]
    observation = a_view(a_layer(len(full), group), full, block, seed)
    assert_equal(judged(scorer, observation), loop_of(scorer).scores(scorer, observation), 1e-5)


def test_comparison_detects_a_wrong_score(scorer, loop_of) -> None:
    observation = view("uneven")
    expected = loop_of(scorer).scores(scorer, observation)
    wrong = [[-value for value in head] for head in expected]
    with pytest.raises(AssertionError):
        assert_equal(wrong, expected, 1e-5)


def test_scores_are_deterministic_and_neither_nan_nor_minus_infinity(scorer) -> None:
    observation = view("uneven")
    first = scorer.score(observation)
    assert not first.isnan().any()
    assert not first.isneginf().any()
    assert torch.equal(scorer.score(observation), first)


def test_inputs_are_not_modified(scorer) -> None:
    observation = view("uneven")
    tensors = (
        observation.entries.keys,
        observation.entries.values,
        observation.entries.positions,
        observation.queries,
        observation.query_positions,
        observation.keys,
    )
    before = [tensor.clone() for tensor in tensors]
    scorer.score(observation)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_unowned_rows_are_ignored(scorer) -> None:
    observation = view("uneven")
    lengths, starts = observation.entries.lengths, observation.entries.starts
    keys = observation.entries.keys.clone()
    for start, length in zip(starts, lengths, strict=True):
        keys[start + length : start + length + 2] = 1e4
    spoiled = replace(observation, entries=replace(observation.entries, keys=keys))
    assert torch.equal(scorer.score(spoiled), scorer.score(observation))


def reordered(observation: Observation, order: list[int]) -> Observation:
    """Observation with kv heads, and their query heads, in another order."""
    old, group = observation.entries, observation.layer.group
    heads = [old.head_positions(head).tolist() for head in order]
    fresh = some_entries(observation.layer, heads)
    fresh = replace(fresh, columns=some_columns(len(fresh.keys)))
    for index, head in enumerate(order):
        rows = fresh.rows(index)
        fresh.keys[rows], fresh.values[rows] = old.head_keys(head), old.head_values(head)
        for name, column in fresh.columns.items():
            column[rows] = old.columns[name][old.rows(head)]
    rows = [head * group + r for head in order for r in range(group)]
    return replace(
        observation, entries=fresh, queries=observation.queries[rows], keys=observation.keys[order]
    )


def test_head_order_does_not_matter(scorer) -> None:
    if public_name(type(scorer)) == "random":
        pytest.skip("it draws for each head in turn, so that order counts")
    seen, order = view("uneven"), [2, 0, 1]
    straight = judged(scorer, seen)
    turned = judged(scorer, reordered(seen, order))
    assert_equal(turned, [straight[head] for head in order], 1e-6)


def test_half_precision_is_scored_in_float32(scorer) -> None:
    observation = view("uneven")
    low = replace(
        observation,
        entries=halved(observation.entries),
        queries=observation.queries.bfloat16(),
        keys=observation.keys.bfloat16(),
    )
    wide = replace(
        low,
        entries=replace(low.entries, keys=low.entries.keys.float()),
        queries=low.queries.float(),
        keys=low.keys.float(),
    )
    assert_equal(judged(scorer, low), judged(scorer, wide), 2e-3)


def halved(entries: Entries) -> Entries:
    return replace(entries, keys=entries.keys.bfloat16(), values=entries.values.bfloat16())


def test_scorer_is_frozen_and_cited(scorer) -> None:
    for field in fields(scorer):
        with pytest.raises(FrozenInstanceError):
            setattr(scorer, field.name, None)
    module = inspect.getmodule(type(scorer))
    assert PAPER.search(module.__doc__), module.__name__


def test_scratch_prompts_have_tokens_and_valid_spans(scorer) -> None:
    book = {name: (7, 8, 9) for name in scorer.required_prompts()}
    block = tuple(range(10, 30))
    for start in (0, 40):
        for scratch in scorer.scratch(block, start, book):
            assert scratch.tokens
            assert 0 <= scratch.span[0] < scratch.span[1] == min(scratch.span[1], start + 20)


def test_reconstruction_repeats_every_token_once() -> None:
    block = tuple(range(100, 120))
    asked = Reconstruct(chunk=7).scratch(block, 0, {"repeat": (1, 2)})
    assert [s.span for s in asked] == [(0, 7), (7, 14), (14, 20)]
    even = Reconstruct(chunk=8).scratch(block[:17], 0, {"repeat": (1, 2)})
    assert [s.span for s in even] == [(0, 6), (6, 12), (12, 17)]
    assert sum((s.ids[2:] for s in asked), ()) == block
    assert all(s.ids[:2] == (1, 2) for s in asked)
    later = Reconstruct(chunk=7).scratch(block, 30, {"repeat": (1, 2)})
    assert [(s.ids, s.span) for s in later] == [((1, 2, *block), (0, 50))]


@pytest.mark.parametrize("variant", [Variant.PAPER, Variant.CODE])
@pytest.mark.parametrize("length", [3, 20, 21, 27])
@pytest.mark.parametrize("chunk", [3, 10])
def test_published_repeat_prompts_quote_the_previous_tokens(
    loop_of, variant, length, chunk
) -> None:
    part, block = Reconstruct(chunk=chunk, variant=variant), tuple(range(100, 100 + length))
    asked = part.scratch(block, 0, {"repeat": (1, 2)})
    got = [(list(scratch.ids), *scratch.span) for scratch in asked]
    assert got == loop_of(part).repeats(part, list(block), [1, 2])
    assert [stop for _, _, stop in got][-1] == length
    later = part.scratch(block, 30, {"repeat": (1, 2)})
    assert [(s.ids, s.span) for s in later] == [((1, 2, *block), (0, 30 + length))]


def a_prompt_that_looks_at_itself() -> Observation:
    """Two entries and two prompt tokens: the first asks for entry 0, but more for itself."""
    layer = a_layer(1, 1)
    entries = some_entries(layer, [[0, 1]], slack=0)
    axes = torch.eye(layer.head_dim) / layer.scaling
    entries.keys[:] = torch.eye(layer.head_dim)[:2]
    first = math.log(9) * axes[0] + 5 * axes[2]
    second = math.log(1.5) * axes[1]
    queries, keys = torch.stack([first, second])[None], torch.eye(layer.head_dim)[None, [2, 2]]
    return Observation(layer, entries, queries, torch.tensor([2, 3]), 2, (0, 2), keys=keys)


@pytest.mark.parametrize("kind", [Patched, Reconstruct])
def test_paper_variant_counts_attention_among_prompt_tokens(kind) -> None:
    seen = a_prompt_that_looks_at_itself()
    alone = kind().score(seen)
    assert alone.tolist() == pytest.approx([0.9, 0.6])
    plain = kind(variant=Variant.PAPER).score(seen)
    assert plain.tolist() == pytest.approx([1 / 4.5, 1.5 / 4.5])
    assert alone.argmax() != plain.argmax()


def test_published_reconstruction_shares_weights_with_the_opening() -> None:
    observation = replace(a_prompt_that_looks_at_itself(), span=(1, 2))
    wide, narrow = (
        Reconstruct(opening=n, variant=Variant.PAPER).score(observation) for n in (1, 0)
    )
    assert wide.tolist() == pytest.approx([-math.inf, 1.5 / 4.5])
    assert narrow.tolist() == pytest.approx([-math.inf, 1.5 / 3.5])
    assert Reconstruct(opening=1).score(observation).tolist() == pytest.approx([-math.inf, 1.0])


@pytest.mark.parametrize("part", [Patched(), Reconstruct(opening=1)])
@pytest.mark.parametrize("variant", Variant)
def test_entry_of_count_two_equals_two_entries(part, variant) -> None:
    scorer, share = replace(part, variant=variant), torch.tensor([1.0, 2.0, 1.0] * 2)
    observation = a_view(a_layer(2, 2), [[0, 2, 6], [1, 3, 6]], 1)
    entries = observation.entries
    columns = {LOG_COUNT: entries.unpack(share.log())}
    once = replace(observation, entries=replace(entries, columns=columns))
    rows = torch.arange(len(entries.keys))[entries.unpack(share) > 0].repeat_interleave(share.int())
    doubled = Entries(entries.keys[rows], entries.values[rows], entries.positions[rows], *LAYOUT)
    one, two = scorer.score(once), scorer.score(replace(observation, entries=doubled))
    torch.testing.assert_close(one, share * two[torch.tensor([0, 1, 3, 4, 5, 7])])


def test_random_scores_are_uniform_and_depend_on_seed_and_layer() -> None:
    from larder.policy import Random

    observation = view("uneven")
    draws = [Random(seed).score(observation) for seed in range(4)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], Random(0).score(view("uneven", layer=2)))
    long = a_view(a_layer(2, 1, index=5), [range(4000)] * 2, 1)
    scores = Random(1).score(long)
    assert 0 <= scores.min() < 0.01 < 0.99 < scores.max() < 1
    assert abs(float(scores.mean()) - 0.5) < 0.02
    assert abs(float(torch.corrcoef(scores.view(2, -1))[0, 1])) < 0.05
