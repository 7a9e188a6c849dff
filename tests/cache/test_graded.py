"""Several precisions in one layer: what moves, what stays to the bit, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import larder.cache.forms._graded_tiers as tiers
from builders import HEAD_DIM, a_layer, a_plan, draw, layer_options
from cache_stores import attend_held, same_bits
from larder.cache import CacheSpec, GradedLayer, NewTokens, RaggedLayer
from larder.core import LOG_COUNT, CacheError, Codec, Folds, Ledger, Plan, ScaleGranularity
from larder.ops import QuantizedRows, ragged_attention
from references.cache.graded import GradedLoop
from references.ops import quantization

CPU = torch.device("cpu")
LAYER = a_layer(2, 2)
CODECS = (Codec(4, 8, 4), Codec(2, 4, 3, outliers=0.1))
LEDGER = Ledger(("mass", LOG_COUNT))


def a_store(codecs=CODECS, ledger: Ledger = LEDGER, dtype=torch.float32) -> GradedLayer:
    return GradedLayer(LAYER, layer_options(dtype, ledger=ledger, codecs=codecs))


def filled(count: int = 24, codecs=CODECS) -> GradedLayer:
    store, new = a_store(codecs), draw(LAYER, count)
    store.append(new.keys, new.values, new.positions)
    return store


def graded(store: GradedLayer, chosen: list[list[tuple[int, int]]]) -> Plan:
    plan = a_plan([[index for index, _ in head] for head in chosen], store.lengths)
    grades = [grade for head in chosen for _, grade in head]
    return replace(plan, grades=torch.tensor(grades, dtype=torch.int8))


def at_grade(store: GradedLayer, grade: int) -> Plan:
    return graded(store, [[(i, grade) for i in range(n)] for n in store.lengths])


def numbers(store: GradedLayer) -> dict[tuple[int, int], Tensor]:
    """Key and value of every entry, by head and position."""
    entries = store.entries()
    return {
        (h, int(entries.head_positions(h)[i])): torch.cat(
            [entries.head_keys(h)[i], entries.head_values(h)[i]]
        )
        for h in range(len(entries.lengths))
        for i in range(entries.lengths[h])
    }


def grades(store: GradedLayer) -> list[list[int]]:
    entries = store.entries()
    if not len(entries.grades):
        return [[0] * n for n in entries.lengths]
    return [entries.grades[entries.rows(h)].tolist() for h in range(len(entries.lengths))]


def assert_structure(store: GradedLayer, loop: GradedLoop) -> None:
    entries = store.entries()
    for h, head in enumerate(loop.heads):
        assert entries.head_positions(h).tolist() == [slot.position for slot in head]
    assert grades(store) == [[slot.grade for slot in head] for head in loop.heads]
    for grade, tier in enumerate(store._coded, 1):
        held = [(h, size) for h, size in tier.rows.lengths.tolist()]
        assert sorted(held) == loop.sizes(grade)
    assert store.full_precision_lengths == tuple(
        sum(not s.grade for s in head) for head in loop.heads
    )
    assert torch.equal(entries.column("mass"), 2.0 * entries.packed_positions())


def assert_bound(store: GradedLayer) -> None:
    for codec, tier in zip(CODECS, store._coded, strict=True):
        most = len(tier) * (codec.bytes_per_entry(HEAD_DIM, 4) + 4 * len(LEDGER.columns))
        assert tier.nbytes <= most + LAYER.kv_heads * codec.group_bytes(HEAD_DIM)


def merged(data, before, loop: GradedLoop, kept: list[list[int]]) -> tuple[Folds, dict]:
    """Some folds, of any grade into any grade, and what becomes of their targets."""
    rows, sums, first = [], {}, 0
    for h, head in enumerate(loop.heads):
        among = st.integers(0, len(head) - 1)
        for target in data.draw(st.sets(st.sampled_from(kept[h]), max_size=3)) if kept[h] else ():
            total = torch.zeros(2 * HEAD_DIM)
            for source in [target, *data.draw(st.lists(among, max_size=2, unique=True))]:
                weights = data.draw(st.sampled_from([(0.5, 0.5), (0.0, 0.25), (1.0, 1.0)]))
                rows.append((first + source, first + target, *weights))
                by = torch.tensor(weights).repeat_interleave(HEAD_DIM)
                total += by * before[h, head[source].position]
            sums[h, head[target].position] = total
        first += len(head)
    sources, targets, of_keys, of_values = zip(*rows, strict=True) if rows else ((),) * 4
    indices = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    return Folds(*indices, torch.tensor(of_keys).float(), torch.tensor(of_values).float()), sums


def assert_moved(before, after, groups, loop: GradedLoop, sums) -> None:
    """Entries that stay in their group are the same to the bit; others are off as the loop is."""
    for h, head in enumerate(loop.heads):
        new = {slot.group for slot in head if slot.group not in groups[h].values()} - {0}
        for slot in head:
            if slot.group not in new:
                off = (after[h, slot.position] - before[h, slot.position]).abs().max()
                assert off <= (1e-5 if (h, slot.position) in sums else 0)
        for name in new:
            members = [slot for slot in head if slot.group == name]
            codec = CODECS[members[0].grade - 1]
            rows = torch.stack([before[h, slot.position] for slot in members])
            got = torch.stack([after[h, slot.position] for slot in members])
            if codec.outliers:  # numbers that were rounded before may be equally far out
                assert (got - rows).abs().max() <= (rows.amax() - rows.amin()) / 3
                continue
            keys, values = rows.split(HEAD_DIM, dim=1)
            sides = (keys, codec.key_bits, True), (values, codec.value_bits, False)
            expected = torch.cat(
                [
                    torch.tensor(quantization.rounded(side.tolist(), bits, codec.group, by))
                    for side, bits, by in sides
                ],
                dim=1,
            )
            # By size, because what lies in the middle of two codes may go to either.
            torch.testing.assert_close(
                (got - rows).abs(), (expected - rows).abs(), atol=1e-4, rtol=1e-4
            )


@pytest.mark.extended
@settings(max_examples=6)
@given(st.data())
def test_random_operations_equal_the_reference(data) -> None:
    store, loop = a_store(), GradedLoop(LAYER.kv_heads, [codec.group for codec in CODECS])
    length = 0
    for step in range(data.draw(st.integers(2, 6))):
        size = data.draw(st.integers(1, 9))
        new = draw(LAYER, size, length)
        store.append(new.keys, new.values, new.positions)
        loop.append(new.positions.tolist())
        length += size
        entries = store.entries()
        store.write_columns({"mass": 2.0 * entries.positions.float()})
        assert_structure(store, loop)
        before = numbers(store)
        groups = [{slot.position: slot.group for slot in head} for head in loop.heads]
        choice = st.sampled_from([-1, 0, 0, 0, 1, 1, 2])  # -1: goes
        picked = [[data.draw(choice) for _ in head] for head in loop.heads]
        kept = [[i for i, to in enumerate(own) if to >= 0] for own in picked]
        folds, sums = merged(data, before, loop, kept)
        targets = [
            {i for i in own if (h, loop.heads[h][i].position) in sums} for h, own in enumerate(kept)
        ]
        chosen = [
            [(i, picked[h][i] if i in targets[h] else max(loop.heads[h][i].grade, picked[h][i]))
             for i in own]
            for h, own in enumerate(kept)
        ]  # fmt: skip
        plan = replace(graded(store, chosen), folds=folds)
        (store.apply if step % 2 else store.evict)(plan)
        loop.keep(chosen, targets)
        assert_structure(store, loop)
        assert_moved(before | sums, numbers(store), groups, loop, sums)
        assert_bound(store)
    assert same_bits(store.fork().state(), store.state())
    at = data.draw(st.integers(0, length))
    store.truncate(at)
    loop.truncate(at)
    assert_structure(store, loop)
    assert_bound(store)


@pytest.mark.parametrize("queries", [1, 18])
def test_attention_equals_that_over_decoded_entries(queries) -> None:
    store = filled()
    chosen = [[(i, (0, 1, 2, 1)[i % 4]) for i in range(h, 24)] for h in range(2)]
    store.apply(graded(store, chosen))
    entries = store.entries()
    store.write_columns({LOG_COUNT: torch.rand(len(entries.positions))})
    entries = store.entries()
    asked = draw(LAYER, queries, 24)
    layout = torch.tensor(entries.starts), torch.tensor(entries.lengths), LAYER.scaling
    expected = ragged_attention(
        asked.queries, entries.keys, entries.values, *layout, entries.columns[LOG_COUNT]
    )[0]
    got = attend_held(store, asked)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_codes_are_kept_while_half_of_their_group_remains() -> None:
    store = filled(8, (Codec(2, 2, 8), Codec(2, 2, 8)))
    store.apply(at_grade(store, 1))
    first = numbers(store)
    for left in ([0, 2, 3, 5, 7], [0, 2, 3, 4]):
        store.evict(a_plan([left] * 2, store.lengths))
        assert all(torch.equal(own, first[at]) for at, own in numbers(store).items())
    new = draw(LAYER, 4, 8)
    store.append(new.keys, new.values, new.positions)
    store.evict(graded(store, [[(i, 1) for i in (0, 1, 2, 4, 5, 6, 7)]] * 2))
    assert [tuple(g) for g in store._coded[0].rows.lengths.tolist()] == [(0, 7), (1, 7)]


def test_invalid_plans_are_refused() -> None:
    store = filled(6)
    store.apply(graded(store, [[(0, 0), (1, 1), (2, 2), (3, 0)]] * 2))
    before = store.state()
    plan, lengths = at_grade(store, 2), store.lengths
    kept = len(plan.kept)
    self_fold = torch.tensor([0])
    one = torch.ones(1)
    onto = lambda target: Folds(self_fold, torch.tensor([target]), one, one)  # noqa: E731
    stay = a_plan([range(n) for n in lengths], lengths)
    wrong = {
        "precision cannot be restored": replace(plan, grades=torch.zeros(kept, dtype=torch.int8)),
        "give one each": replace(plan, grades=plan.grades[1:]),
        "has 0 to 2": replace(plan, grades=plan.grades + 1),
        "is a merge target, but the plan does not keep": replace(
            a_plan([range(1, n) for n in lengths], lengths), folds=onto(0)
        ),
        "weigh each once": replace(stay, channels=torch.ones(2, HEAD_DIM + 1)),
        "no 'moss'": replace(stay, columns={"moss": torch.ones(kept)}),
    }
    for message, bad in wrong.items():
        for carry_out in (store.apply, store.evict):
            with pytest.raises(CacheError, match=message):
                carry_out(bad)
            assert same_bits(store.state(), before)
    huge = draw(LAYER, 1, 6)
    store.append(huge.keys * 1e6, huge.values, huge.positions)
    before = store.state()
    with pytest.raises(CacheError, match="keep such entries at full precision"):
        store.apply(at_grade(store, 2))
    assert same_bits(store.state(), before)


def test_channels_are_dropped_by_weight() -> None:
    store = filled(12, (Codec(0, 8, 4, channels=0.5),))
    exact = store.entries().keys.clone()
    weights = torch.stack([torch.arange(8.0), -torch.arange(8.0)])
    rows = [exact[store.entries().rows(h)] for h in range(2)]
    store.apply(replace(at_grade(store, 1), channels=weights))
    entries = store.entries()
    for head, kept in enumerate((range(4, 8), range(4))):
        lost = [c for c in range(8) if c not in kept]
        assert torch.equal(entries.head_keys(head)[:, kept], rows[head][:, kept])
        assert not entries.head_keys(head)[:, lost].any()


def test_chunked_quantization_equals_unchunked(monkeypatch) -> None:
    whole, pieces = filled(), filled()
    whole.apply(at_grade(whole, 1))
    monkeypatch.setattr(tiers, "CODING_CHUNK", 5)
    pieces.apply(at_grade(pieces, 1))
    assert same_bits(whole.state(), pieces.state())
    shown, expected = pieces.entries(), whole.entries()
    assert torch.equal(shown.keys, expected.keys) and torch.equal(shown.values, expected.values)


def test_codes_are_decoded_on_access(monkeypatch) -> None:
    store, asked, decoded = filled(), [], QuantizedRows.decoded
    store.apply(at_grade(store, 1))
    monkeypatch.setattr(
        QuantizedRows, "decoded", lambda own, *of: asked.append(own) or decoded(own, *of)
    )
    mass = 3.0 * store.entries().positions
    entries = store.entries().with_columns({"mass": mass})
    assert torch.equal(entries.column("mass"), mass) and not entries.column(LOG_COUNT).any()
    assert entries.empty_like.shape == (0, HEAD_DIM) and bool(entries.pack(entries.grades).all())
    assert asked == []
    assert entries.keys is entries.keys and entries.head_keys(1).shape == (24, HEAD_DIM)
    assert asked == [store._coded[0].rows.keys]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantized_bytes_hand_values(bits) -> None:
    layer = replace(a_layer(2, 1), head_dim=64)
    store = GradedLayer(layer, layer_options(codecs=(Codec(bits, bits, 32),)))
    new = draw(layer, 1024)
    store.append(new.keys, new.values, new.positions)
    store.compact()
    assert store.nbytes == 2048 * (2 * 64 * 4 + 4) + 2 * 2 * 8
    assert store.entries_copy_bytes == 0
    store.apply(at_grade(store, 1))
    codes = 2048 * 2 * 64 * bits // 8
    values = 2048 * 2 * (64 // 32) * 2  # an offset and a scale of two bytes for every 32 channels
    keys = 2048 // 32 * 64 * 2 * 2
    assert store.nbytes == codes + values + keys + 2048 * 4 + 2048 // 32 * 8 + 2 * 2 * 8
    assert store.entries_copy_bytes == 2048 * (2 * 64 * 4 + 4 + 1)
    shown = store.entries()
    copied = shown.keys, shown.values, shown.positions, shown.grades
    assert store.entries_copy_bytes == sum(t.untyped_storage().nbytes() for t in copied)


def test_keys_with_scales_per_entry_round_trip() -> None:
    codecs = Codec(5, 3, 4, key_scales=ScaleGranularity.ENTRY), Codec(7, 1, 4)
    store = filled(12, codecs)
    store.apply(graded(store, [[(i, 1 + i % 2) for i in range(n)] for n in store.lengths]))
    restored = GradedLayer.adopt(LAYER, store.state())
    assert [tier.codec for tier in restored._coded] == list(codecs)
    assert numbers(restored).keys() == numbers(store).keys()
    assert all(torch.equal(own, numbers(store)[at]) for at, own in numbers(restored).items())


def test_cache_spec_round_trips_through_its_text() -> None:
    codecs = Codec(4, 8, 4), Codec(5, 3, key_scales=ScaleGranularity.ENTRY)
    spec = CacheSpec("graded", LEDGER, codecs=codecs)
    assert CacheSpec.of(spec.meta()) == spec
    assert "key_scales" not in CacheSpec("graded", LEDGER, codecs=codecs[:1]).meta()["codecs"]


def test_one_call_attends_to_a_block_until_an_entry_is_quantized() -> None:
    drawn = draw(LAYER, 40, 24)
    new = NewTokens(drawn.queries, drawn.keys, drawn.values, drawn.positions)
    store = filled()
    exact = RaggedLayer(LAYER, layer_options(torch.float32))
    held = draw(LAYER, 24)
    exact.append(held.keys, held.values, held.positions)
    assert store.block_call(new) is not None
    torch.testing.assert_close(store.attend(new), exact.attend(new))
    store.apply(at_grade(store, 1))
    assert store.block_call(new) is None
