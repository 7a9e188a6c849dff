"""Transform layers: what is held of coded entries, in how many bytes, and how it is attended to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_plan, a_spec, draw, layer_options
from cache_stores import assert_close, attend_held, same_bits
from larder.cache import (
    INDEX_BYTES,
    SPEC_KEY,
    SequenceCache,
    TransformLayer,
    TransformTables,
    text_of,
    text_tensor,
    tiers_of,
)
from larder.core import (
    LOG_COUNT,
    BudgetError,
    CacheError,
    Coder,
    Folds,
    LayerScores,
    Ledger,
    MeanSource,
    Plan,
    ScoreScale,
    TransformSpec,
)
from larder.policy import Transform
from references import transform as reference
from transforms import FINE_STEP, a_transform_layer, some_tables

LAYER = a_layer(2, 2)
STEP_CODERS = Coder.ENTROPY, Coder.PLANES, Coder.WIDTHS
LEDGER = Ledger(("mass", LOG_COUNT))
CHOSEN = [[0, 1, 3, 4, 5, 6, 8, 9, 11], [2, 5, 7, 8, 9]]
GRADES = (0, 3, 1, 5, 3, 2, 4, 3, 0, 3, 3, 0, 5, 1)


def coded(
    coder: Coder = Coder.ENTROPY,
    step: float = FINE_STEP,
    ledger: Ledger = LEDGER,
    mean: MeanSource = MeanSource.TEXT,
) -> TransformLayer:
    """Layer of twelve tokens, some of which stay at several grades."""
    store = a_transform_layer(LAYER, ledger=ledger, coder=coder, step=0.0, mean=mean)
    new = draw(LAYER, 12)
    store.append(new.keys, new.values, new.positions)
    grades = torch.tensor(GRADES, dtype=torch.int8)
    store.apply(replace(a_plan(CHOSEN, store.lengths), grades=grades, step=step))
    return store


def numbers(store: TransformLayer) -> Tensor:
    entries = store.entries()
    return torch.cat([entries.pack(entries.keys), entries.pack(entries.values)], 1)


def originals() -> Tensor:
    new = draw(LAYER, 12)
    sides = [
        torch.cat([part[head][own] for head, own in enumerate(CHOSEN)])
        for part in (new.keys, new.values)
    ]
    return torch.cat(sides, 1)


@pytest.mark.extended
@pytest.mark.parametrize("coder", STEP_CODERS)
def test_tiny_step_equals_exact_storage(coder) -> None:
    store = coded(coder)
    assert store.lengths == (9, 5)
    assert store.full_precision_lengths == (2, 1)
    assert_close(numbers(store), originals())
    assert store.entries().grades.tolist() == list(GRADES)
    assert store.entries().packed_positions().tolist() == CHOSEN[0] + CHOSEN[1]
    exact = store.entries().grades == 0
    assert torch.equal(numbers(store)[exact], originals()[exact])


def components_by_loop(store: TransformLayer) -> list[list[float]]:
    """Components of the coded entries before they are rounded, in order of the tier."""
    new, tables, batch = draw(LAYER, 12), store.tier.tables, store.tier.batch()
    return [
        [
            reference.component(
                part[head, position].tolist(),
                tables.mean[side, head].tolist(),
                tables.forward[side, head].tolist(),
                LAYER.radians or () if side == 0 else (),
                position,
                place,
            )
            for side, part in enumerate((new.keys, new.values))
            for place in range(LAYER.head_dim)
        ]
        for head, position in zip(batch.heads.tolist(), batch.positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("coder", STEP_CODERS)
@pytest.mark.parametrize("mean", MeanSource)
def test_decoded_entries_equal_their_reference(coder, mean) -> None:
    store, step = coded(coder, step=0.3, mean=mean), 0.3
    batch, plain = store.tier.batch(), components_by_loop(store)
    for head in range(LAYER.kv_heads):
        rows = (batch.heads == head).nonzero().flatten().tolist()
        around = reference.means([plain[row] for row in rows])
        around = [0.0] * len(around) if mean is MeanSource.MODEL else around
        for row in rows:
            expected = [
                reference.rounded(number, step, int(batch.tiers[row]), own)
                for number, own in zip(plain[row], around, strict=True)
            ]
            got = batch.components[row]
            torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-4)


def test_entries_reencoded_with_the_same_step_keep_their_means() -> None:
    store = coded(step=0.3)
    batch = store.tier.batch()
    again = store.tier.encoded(batch.select(torch.arange(3)), 0.3)
    assert same_bits({"x": again.batch().components}, {"x": batch.components[:3]})
    coarser = store.tier.encoded(batch.select(torch.arange(3)), 0.4)
    assert not torch.equal(coarser.means.numbers, store.tier.means.numbers)


def test_state_without_means_is_restored_without_means() -> None:
    store = coded(step=0.3, mean=MeanSource.MODEL)
    state = store.state()
    spec = text_of(state[SPEC_KEY]).replace(', "mean": "model"', "")
    older = {key: own for key, own in state.items() if "mean" not in key}
    back = TransformLayer.restore(LAYER, older | {SPEC_KEY: text_tensor(spec)})
    assert isinstance(back, TransformLayer)
    assert "mean" not in spec and back.tier.spec == store.tier.spec
    assert torch.equal(numbers(back), numbers(store))


@pytest.mark.parametrize("coder", STEP_CODERS)
@pytest.mark.parametrize("queries", [1, 20])
def test_attention_equals_that_over_decoded_entries(coder, queries) -> None:
    store, new = coded(coder, step=0.5), draw(LAYER, queries, 12)
    columns = {LOG_COUNT: torch.arange(14.0) / 5}
    store.write_columns(columns)
    entries, out = store.entries(), attend_held(store, new)
    assert entries.column(LOG_COUNT).tolist() == columns[LOG_COUNT].tolist()
    for query_head in range(LAYER.query_heads):
        head = query_head // LAYER.group
        keys, values = entries.head_keys(head), entries.head_values(head)
        bias = entries.columns[LOG_COUNT][entries.rows(head)]
        # The weight of an entry as often as its count says: a key of one more number.
        wide = torch.cat([keys, bias[:, None] / LAYER.scaling], 1).tolist()
        for place in range(queries):
            asked = [*new.queries[query_head, place].tolist(), 1.0]
            expected = reference.attention(asked, wide, values.tolist(), LAYER.scaling)
            assert_close(out[query_head, place], torch.tensor(expected))


def test_head_without_entries_has_zero_output() -> None:
    store, new = a_transform_layer(LAYER, step=0.1), draw(LAYER, 6)
    store.append(new.keys, new.values, new.positions)
    plan = a_plan([[1, 2, 3], []], store.lengths)
    store.apply(replace(plan, grades=torch.full((3,), 3, dtype=torch.int8)))
    out = attend_held(store, draw(LAYER, 2, 6))
    assert not out[2:].any() and out[:2].any()


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_outlier_components_are_kept(coder) -> None:
    store, new = a_transform_layer(LAYER, coder=coder, step=0.01), draw(LAYER, 4)
    values = new.values.clone()
    values[0, 1, 3], values[1, 2, 0] = 3e5, -2e4
    store.append(new.keys, values, new.positions)
    plan = a_plan([range(4)] * 2, store.lengths)
    store.apply(replace(plan, grades=torch.full((8,), 3, dtype=torch.int8)))
    held = store.entries()
    assert float(held.head_values(0)[1, 3]) == pytest.approx(3e5, rel=1e-5)
    assert float(held.head_values(1)[2, 0]) == pytest.approx(-2e4, rel=1e-5)


def test_non_finite_entries_are_refused() -> None:
    store, new = a_transform_layer(LAYER), draw(LAYER, 4)
    values = new.values.clone()
    values[0, 1, 3] = math.inf
    store.append(new.keys, values, new.positions)
    before = store.state()
    plan = a_plan([range(4)] * 2, store.lengths)
    with pytest.raises(CacheError, match="must be finite"):
        store.apply(replace(plan, grades=torch.full((8,), 3, dtype=torch.int8)))
    assert same_bits(store.state(), before)


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_bytes_are_those_of_index_payload_and_exact_entries(coder) -> None:
    store = coded(coder, step=0.5, ledger=Ledger())
    tier = store.tier
    sizes = tier.index[:, 4].tolist()
    assert len(tier.payload) == sum(sizes)
    assert tier.index.nbytes == INDEX_BYTES * len(sizes)
    ragged = 3 * (2 * LAYER.head_dim * 4 + 4) + 2 * 2 * 8
    means = LAYER.kv_heads * (2 * LAYER.head_dim + 2 * 4)
    real = tier.index.nbytes + len(tier.payload) + means
    assert store.nbytes == ragged + real
    estimate = tier.estimate(tier.centered(tier.batch(), 0.5), 0.5)
    assert real <= estimate <= real + 8 * len(sizes)


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_block_offsets_are_cumulative(coder) -> None:
    tier = coded(coder, step=0.5).tier
    rows = tier.index.tolist()
    assert len(tier.blocks) == len(rows) > 2
    for place, block in enumerate(tier.blocks):
        assert [*block[:4]] == rows[place][:4]
        start, entry = (sum(row[field] for row in rows[:place]) for field in (4, 1))
        assert block.codes == slice(start, start + rows[place][4])
        assert block.entries == slice(entry, entry + rows[place][1])


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_restored_copy_continues_identically(coder) -> None:
    store = coded(coder, step=0.5)
    back = TransformLayer.restore(LAYER, store.state())
    assert same_bits(store.state(), back.state())
    for start in range(12, 30):
        new = draw(LAYER, 1, start)
        for twin in (store, back):
            twin.append(new.keys, new.values, new.positions)
        assert torch.equal(attend_held(store, new), attend_held(back, new))
    assert same_bits(store.state(), back.state())
    assert same_bits(store.fork().state(), back.state())


def test_state_of_another_calibration_is_refused() -> None:
    state = coded().state()
    from safetensors.torch import save_file

    from larder.cache import tables_path, transform_tables

    path = tables_path("", "transform")
    save_file(transform_tables.state_of({0: some_tables(LAYER, seed=7)}), path)
    transform_tables._read.cache_clear()
    with pytest.raises(CacheError, match="build the cache again"):
        TransformLayer.restore(LAYER, state)


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_state_of_another_version_of_a_coder_is_refused(coder) -> None:
    state = coded(coder).state()
    name, _, former = text_of(state[SPEC_KEY]).partition(" ")
    other = "lanes" if name == "planes" else "planes"
    for text in (former, f"{other} {former}"):
        with pytest.raises(CacheError, match="another version"):
            TransformLayer.restore(LAYER, state | {SPEC_KEY: text_tensor(text)})


def test_damaged_planes_are_refused() -> None:
    store = coded(Coder.PLANES, step=0.5)
    block = store.tier.blocks[1]
    size = block.codes.start + 1 + 3  # a byte of positions, three of tiers
    for place, byte in ((size, 1), (size + 3, 0x80), (size + 4, 2), (size - 1, 0xFF)):
        state = store.state()
        state[PAYLOAD][place] ^= byte
        with pytest.raises(CacheError, match="damaged"):
            TransformLayer.restore(LAYER, state)


HEAD, COUNT, FIRST, SPAN, SIZE = range(5)  # of a row of the index
INDEX, PAYLOAD = "transform.index", "transform.payload"


@pytest.mark.parametrize("coder", STEP_CODERS)
@pytest.mark.parametrize(
    ("field", "change"),
    [(HEAD, 2), (HEAD, -1), (COUNT, 1), (COUNT, -4), (COUNT, 9), (FIRST, -20)]
    + [(SPAN, 1), (SPAN, -1), (SPAN, 800), (SIZE, 2), (SIZE, -2), (SIZE, 1 << 20)],
)
def test_damaged_index_is_refused(coder, field, change) -> None:
    state = coded(coder).state()
    state[INDEX][0, field] += change
    with pytest.raises(CacheError, match="damaged"):
        TransformLayer.restore(LAYER, state)


def test_damaged_positions_are_refused() -> None:
    state = coded().state()
    assert int(state[PAYLOAD][0]) == 0b10111000
    for places in (0b01111000, 0b11111000, 0b10111001, 0b00000000):
        state[PAYLOAD][0] = places
        with pytest.raises(CacheError, match="damaged"):
            TransformLayer.restore(LAYER, state)


@pytest.mark.parametrize("places", [[90, 0], [7, 7], [-2, 90], [1 << 30, 7]])
def test_damaged_positions_without_a_bitmap_are_refused(places: list[int]) -> None:
    spec, device = TransformSpec(sinks=0, recent=0, block=2), torch.device("cpu")
    like = a_transform_layer(LAYER)  # saves its tables
    store = TransformLayer(LAYER, layer_options(device=device, transform=spec), like.tier.tables)
    new = draw(LAYER, 100)
    store.append(new.keys, new.values, new.positions)
    plan = a_plan([[0, 90], []], store.lengths)
    store.apply(replace(plan, grades=torch.full((2,), 3, dtype=torch.int8), step=0.5))
    state = store.state()
    assert same_bits(TransformLayer.restore(LAYER, state).state(), state)
    state[PAYLOAD][:8] = torch.tensor(places, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(CacheError, match="damaged"):
        TransformLayer.restore(LAYER, state)


def test_payload_or_columns_of_another_size_are_refused() -> None:
    state = coded().state()
    for name, part in ((PAYLOAD, state[PAYLOAD][:-2]), ("transform.columns", torch.zeros(2, 3))):
        with pytest.raises(CacheError, match="damaged"):
            TransformLayer.restore(LAYER, state | {name: part.clone()})


def test_model_that_is_not_calibrated_is_refused() -> None:
    with pytest.raises(CacheError, match="larder model calibrate"):
        SequenceCache(a_spec(LAYER), "ragged", transform=TransformSpec())
    with pytest.raises(CacheError, match="rotary"):
        TransformTables.load(replace(LAYER, radians=None), TransformSpec())


def test_layers_of_a_cache_are_fitted_with_one_step() -> None:
    """The form of the specification is `ragged`, whose layers are fitted one by one."""
    a_transform_layer(LAYER)  # saves its tables
    cache = SequenceCache(a_spec(LAYER, LAYER), "ragged", transform=TransformSpec(block=4))
    plans = dict[int, Plan]()
    for layer in range(2):
        new = draw(LAYER, 60, seed=layer)
        cache.step_layer(layer).append((1 + layer) * new.keys, new.values, new.positions)
        plan = a_plan([range(0, 60, 2), range(0, 60, 3)], (60, 60))
        grades = torch.full((len(plan.kept),), 3, dtype=torch.int8)
        given = {"grades": grades, "importance": torch.zeros(len(grades)), "allowed_bytes": 3000}
        plans[layer] = replace(plan, **given)
    steps = {plan.step for plan in cache.fit_plans(plans).values()}
    assert len(steps) == 1 and steps != {0.0}


def test_truncating_and_dropping_keep_the_codes_of_the_others() -> None:
    store = coded(step=0.5)
    before = numbers(store)
    positions = store.entries().packed_positions()
    store.truncate(9)
    assert torch.equal(numbers(store), before[positions < 9])
    store.drop_range(3, 6)
    stays = (positions < 9) & ~((positions >= 3) & (positions < 6))
    assert torch.equal(numbers(store), before[stays])


def test_grades_only_become_coarser() -> None:
    store = coded(step=0.5)
    kept = torch.arange(14)
    wanted = torch.tensor([0, 5, 5, 1, 1, 5, 1, 5, 0, 1, 1, 0, 1, 1], dtype=torch.int8)
    store.apply(Plan(kept, (9, 5), grades=wanted))
    former = torch.tensor(GRADES, dtype=torch.int8)
    assert store.entries().grades.tolist() == torch.maximum(former, wanted).tolist()


def test_merges_apply_to_decoded_entries() -> None:
    store = coded(step=0.1)
    held = numbers(store)
    one = torch.tensor([1, 1]), torch.tensor([3, 0])  # a coded target, and an exact one
    sources, targets = torch.cat([one[0], one[1]]), torch.tensor([3, 0, 3, 0])
    weights = torch.tensor([0.25, 0.5, 0.75, 0.5])
    folds = Folds(sources, targets, weights, weights)
    kept = torch.tensor([0, 2, *range(3, 14)])
    store.apply(Plan(kept, (8, 5), folds=folds))
    merged = numbers(store)
    assert_close(merged[0], 0.5 * held[1] + 0.5 * held[0])
    assert_close(merged[2], 0.25 * held[1] + 0.75 * held[3])
    assert store.full_precision_lengths == (3, 1)
    assert torch.equal(merged[3:], held[4:])


@pytest.mark.parametrize("coder", STEP_CODERS)
def test_generated_entries_are_coded_when_a_block_is_full(coder) -> None:
    store, exact = coded(coder, step=FINE_STEP), a_transform_layer(LAYER, ledger=LEDGER, step=0.0)
    assert_close(numbers(store), originals())
    held = store.entries()
    plan = a_plan(CHOSEN, (12, 12))
    new = draw(LAYER, 12)
    exact.append(new.keys, new.values, new.positions)
    exact.apply(plan)
    most = 0
    for start in range(12, 40):
        new = draw(LAYER, 1, start)
        for twin in (store, exact):
            twin.append(new.keys, new.values, new.positions)
        assert_close(attend_held(store, new), attend_held(exact, new))
        most = max(most, *store.full_precision_lengths)
    assert store.lengths == exact.lengths == (37, 33)
    spec = store.tier.spec
    assert most <= spec.sinks + 1 + spec.recent + spec.block
    assert held.lengths == (9, 5)


def test_tiers_by_importance_equal_their_reference() -> None:
    scores = torch.tensor([0.0, 1e-6, 0.1, 0.24, 0.3, 0.5, 1.0, 2.2, 5.0, 90.0])
    tiers = tiers_of(scores.log2(), scores.log2().median())
    median = float(scores.median())
    assert tiers.tolist() == [reference.tier(score, median) for score in scores.tolist()]
    assert tiers_of(torch.full((3,), -math.inf), torch.tensor(-math.inf)).tolist() == [0, 0, 0]


def fitted_layers(
    allowed: int,
    given: list[Tensor],
    columns: Ledger = LEDGER,
    scale: ScoreScale = ScoreScale.WEIGHTS,
) -> list[Plan]:
    """Fitted plans of layers that keep and code all of twelve tokens, by their importance."""
    stores, plans = list[TransformLayer](), dict[int, Plan]()
    for index, scores in enumerate(given):
        store, new = a_transform_layer(LAYER, step=0.0, ledger=columns), draw(LAYER, 12)
        store.append(new.keys, new.values, new.positions)
        plan = a_plan([range(12), range(12)], (12, 12))
        grades = torch.full((24,), 3, dtype=torch.int8)
        scored = LayerScores(scores, torch.zeros(24, dtype=torch.bool), (12, 12), scale=scale)
        importance = Transform(sinks=0, recent=0)._importance(scored, plan.kept)
        numbers = {"importance": importance, "allowed_bytes": allowed}
        plans[index] = replace(plan, grades=grades, **numbers)
        stores.append(store)
    return [*TransformLayer.fit_plans(stores, plans).values()]


def test_tiers_are_decided_over_all_layers() -> None:
    ones, small, none = torch.ones(24), torch.full((24,), 1 / 64), torch.zeros(24)
    low, high = (set(plan.grades.tolist()) for plan in fitted_layers(1000, [small, ones]))
    assert (low, high) == ({3}, {1})  # the lower median
    mixed = torch.cat([torch.zeros(11), torch.full((13,), 0.25)])
    few, many = fitted_layers(1000, [mixed, ones])
    assert few.grades.tolist() == [5] * 11 + [3] * 13 and set(many.grades.tolist()) == {2}
    zeros = [set(plan.grades.tolist()) for plan in fitted_layers(1000, [none, ones, ones])]
    assert zeros == [{5}, {3}, {3}]
    signed = ones.index_fill(0, torch.tensor(3), -1.0)
    for given in ([none, none], [none, ones], [-ones, ones], [ones, signed, small]):
        assert {*torch.cat([p.grades for p in fitted_layers(1000, given)]).tolist()} == {3}


def test_log_weights_have_the_tiers_of_their_weights() -> None:
    given = [torch.logspace(-6, 3, 24), torch.logspace(2, -1, 24)]
    weights = fitted_layers(1000, given)
    logs = [scores.log() for scores in given]
    found = fitted_layers(1000, logs, scale=ScoreScale.LOGARITHMS)
    assert [plan.grades.tolist() for plan in found] == [plan.grades.tolist() for plan in weights]
    assert [plan.step for plan in found] == [plan.step for plan in weights]
    assert len(set(weights[0].grades.tolist())) == 5
    assert {*fitted_layers(1000, logs)[0].grades.tolist()} == {3}


def test_insufficient_byte_budget_is_refused() -> None:
    ones = [torch.ones(24)] * 2
    with pytest.raises(BudgetError, match="at least .* bytes, but the budget allows 60: raise"):
        fitted_layers(30, ones)
    with pytest.raises(BudgetError, match="at least .* bytes, but the budget allows 200"):
        fitted_layers(100, ones)
    columns, none = fitted_layers(800, ones), fitted_layers(800, ones, Ledger())
    assert columns[0].step > none[0].step
    less = 800 - 4 * 2 * 24
    assert columns[0].step == fitted_layers(less, ones, Ledger())[0].step


@pytest.mark.parametrize("coder", STEP_CODERS)
@pytest.mark.parametrize(("share", "held_bytes"), [(0.1, 1 << 26), (0.3, 1 << 26), (0.3, 1)])
def test_one_step_size_fills_the_byte_budget_of_all_layers(
    coder, share, held_bytes, monkeypatch
) -> None:
    """With one byte for components, those of the second layer are computed again for every step."""
    monkeypatch.setattr("larder.cache.forms._transform_fit.HELD_BYTES", held_bytes)
    layers = [replace(LAYER, index=index) for index in range(2)]
    stores = [a_transform_layer(LAYER, coder=coder, step=0.0, ledger=Ledger()) for _ in layers]
    for index, store in enumerate(stores):
        new = draw(LAYER, 200, seed=index)
        store.append(new.keys * (1 + index), new.values, new.positions)
    full = sum(store.nbytes for store in stores)
    plans = {}
    for index in range(2):
        plan = a_plan([range(0, 200, 2), range(0, 200, 3)], (200, 200))
        grades = torch.full((len(plan.kept),), 3, dtype=torch.int8)
        scores = torch.rand(len(plan.kept), generator=torch.Generator().manual_seed(index))
        given = {"importance": scores.log2(), "allowed_bytes": int(share / 2 * full)}
        plans[index] = replace(plan, grades=grades, **given)
    fitted = TransformLayer.fit_plans(stores, plans)
    assert fitted[0].step == fitted[1].step > 0
    for index, store in enumerate(stores):
        store.apply(fitted[index])
    fixed = 2 * 2 * 2 * 8  # starts and lengths of the ragged parts
    held = sum(store.nbytes for store in stores) - fixed
    allowed = 2 * int(share / 2 * full)
    assert 0.9 * allowed <= held <= allowed  # blocks of 4 entries
