"""SubGen's samples: hand values, and estimates that are right in the mean, also of estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_plan
from larder.cache import merge_entries
from larder.core import LOG_COUNT, BadParameter, Entries, ScoreError
from larder.policy import CLUSTER, DRAWS, MASS, Subgen, systematic
from scalar_entries import judged

COLUMNS = (LOG_COUNT, CLUSTER, DRAWS)


def one_head(keys: torch.Tensor, values: torch.Tensor) -> Entries:
    count = len(keys)
    columns = {name: torch.zeros(count) for name in COLUMNS}
    scalars = {MASS: torch.full((1,), torch.nan)}
    positions = torch.arange(count, dtype=torch.int32)
    return Entries(keys, values, positions, (0,), (count,), columns, scalars)


def settled(part: Subgen, entries: Entries, room: int, spared: tuple[int, ...] = ()) -> Entries:
    """Entries as the layer holds them afterwards."""
    others = [index for index in range(len(entries.keys)) if index not in spared]
    kept = sorted([*spared, *others[:room]])
    scored = judged([0.0] * len(entries.keys), spared)
    plan = part.compensate(a_plan([kept], entries.lengths), entries, scored)
    assert plan.lengths[0] <= room + len(spared)
    merged, keys, values = (
        merge_entries(plan, entries),
        entries.keys.clone(),
        entries.values.clone(),
    )
    keys[merged.targets], values[merged.targets] = merged.keys.to(keys), merged.values.to(values)
    columns = {name: plan.columns[name] for name in COLUMNS}
    rows = keys[plan.kept], values[plan.kept], entries.positions[plan.kept]
    return Entries(*rows, (0,), plan.lengths, columns, dict(plan.scalars))


def joined(entries: Entries, later: Entries, behind: int) -> Entries:
    """Entries with new ones behind them."""
    count = len(later.keys)
    return Entries(
        torch.cat([entries.keys, later.keys]),
        torch.cat([entries.values, later.values]),
        torch.cat([entries.positions, later.positions + behind]),
        (0,),
        (len(entries.keys) + count,),
        {name: torch.cat([entries.columns[name], torch.zeros(count)]) for name in COLUMNS},
        entries.scalars,
    )


def sums(entries: Entries, query: torch.Tensor) -> torch.Tensor:
    """Weighted sum over values and sum over keys, as attention would take them."""
    weights = (entries.keys.double() @ query.double() + entries.columns[LOG_COUNT].double()).exp()
    return torch.cat([(weights[:, None] * entries.values.double()).sum(0), weights.sum()[None]])


def text(count: int, seed: int) -> Entries:
    source = torch.Generator().manual_seed(seed)
    return one_head(*torch.randn(2, count, 4, generator=source))


def test_equal_keys_are_counted_exactly() -> None:
    """Four equal keys and two samples: the sum over keys is 4 e^s."""
    entries = one_head(torch.ones(4, 2), torch.tensor([[1.0, 0.0]] * 4))
    held = settled(Subgen(samples=2, share=0.5), entries, 3)
    query = torch.tensor([0.3, 0.1])
    weights = (held.keys @ query + held.columns[LOG_COUNT]).exp().sum()
    assert float(weights) == pytest.approx(4 * float(torch.tensor(0.4).exp()), rel=1e-5)
    assert torch.allclose(sums(held, query)[:2], sums(entries, query)[:2], rtol=1e-5)


def test_sample_weight_is_mass_over_samples_and_squared_norm() -> None:
    """Values of squares 1 and 3, one draw: it stands for mass 4, whichever it is."""
    values = torch.tensor([[1.0, 0.0], [0.0, 3**0.5], [0.0, 0.0]])
    for seed in range(8):
        held = settled(Subgen(seed=seed, share=0.5), one_head(torch.zeros(3, 2), values), 2)
        drawn = int(held.columns[DRAWS].argmax())
        norm = float((held.values[drawn] * held.columns[LOG_COUNT][drawn].exp()).norm())
        assert norm == pytest.approx(4.0) or norm == pytest.approx(4 / 3**0.5)


@pytest.mark.extended
@pytest.mark.parametrize("again", [False, True])
def test_estimates_are_unbiased(again: bool) -> None:
    """Also where samples are sampled again behind later entries, with fewer slots."""
    first, later = text(30, 1), text(20, 2)
    query, totals = 0.5 * torch.randn(4, generator=torch.Generator().manual_seed(3)), []
    for seed in range(60):
        part = Subgen(seed=seed, delta=0.3)
        held = settled(part, first, 18)
        if again:
            held = settled(part, joined(held, later, 30), 12)
        totals.append(sums(held, query))
    found, expected = torch.stack(totals), sums(first, query)
    expected = expected + sums(later, query) if again else expected
    error = found.std(0) / len(totals) ** 0.5
    assert bool(((found.mean(0) - expected).abs() < 4.5 * error + 1e-5).all())
    assert bool((error[:4] > 0).all())


def test_earlier_samples_keep_their_mass() -> None:
    """The mass is the sum of |v|^2 of all that was sampled, however often."""
    first, later = text(30, 1), text(20, 2)
    held = settled(Subgen(), first, 18)
    squares = [float(each.values.double().square().sum()) for each in (first, later)]
    assert float(held.scalars[MASS]) == pytest.approx(squares[0], rel=1e-5)
    again = settled(Subgen(), joined(held, later, 30), 12)
    assert float(again.scalars[MASS]) == pytest.approx(sum(squares), rel=1e-5)


def test_error_decreases_with_samples() -> None:
    entries, query = text(120, 4), 0.5 * torch.ones(4)
    true, errors = sums(entries, query), []
    for room in (15, 40, 90):
        found = [sums(settled(Subgen(seed=s, delta=0.2), entries, room), query) for s in range(8)]
        errors.append(float((torch.stack(found) - true).norm(dim=1).mean()))
    assert errors == sorted(errors, reverse=True)


def test_protected_entries_stay_exact() -> None:
    entries = text(30, 5)
    held = settled(Subgen(), entries, 10, spared=(0, 28, 29))
    for index in (0, 28, 29):
        row = int((held.positions == index).nonzero())
        assert torch.equal(held.values[row], entries.values[index])
        assert [float(held.columns[name][row]) for name in COLUMNS] == [0.0] * 3


def test_sample_counts_sum_exactly() -> None:
    source = torch.Generator().manual_seed(6)
    weights = torch.rand(1000, generator=source, dtype=torch.float64)
    weights[-3:] = 0.0
    for draws in (0, 1, 7, 3000):
        counts = systematic(weights, draws, torch.rand(1, generator=source, dtype=torch.float64))
        assert int(counts.sum()) == draws
        shares = weights * draws / weights.sum()
        assert bool(((counts - shares).abs() <= 1 + 1e-9).all())
        assert int(counts[-3:].sum()) == 0


def test_half_precision_values_stay_finite() -> None:
    entries = text(60, 7)
    entries = replace(entries, keys=entries.keys.half(), values=entries.values.half())
    assert bool(settled(Subgen(), entries, 10).values.isfinite().all())


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"samples": 0}, {"share": 1.0}])
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match="subgen."):
        Subgen(**wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_keys_are_refused(bad: float) -> None:
    keys = torch.randn(8, 4)
    keys[3, 1] = bad
    with pytest.raises(ScoreError, match="or take drop"):
        settled(Subgen(), one_head(keys, torch.randn(8, 4)), 4)
