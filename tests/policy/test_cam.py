"""CaM by numbers that were worked out by hand, and what its values promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_plan
from larder.cache.folding import folded
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.policy.compensation.cam import Cam, Merge
from lines import judged, line, numbers


def with_mass(entries: Entries, mass: list[float]) -> Entries:
    return replace(entries, columns={**entries.columns, "mass": torch.tensor(mass)})


def test_cam_by_hand() -> None:
    # 1 joins 2 and 4 with .3 / mean(.2, .8) = .6, 3 joins 4 and 5 with .9 / .5 (clamped to 1), and
    # after 6 nothing follows.
    entries = line([0, 1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1] * 7)
    entries = with_mass(entries, [9.0, 0.3, 0.2, 0.9, 0.8, 0.2, 0.4])
    plan = Cam(window=2).settle(a_plan([[0, 2, 4, 5]], (7,)), entries, judged([0.0] * 7))
    keys, values, counts = numbers(plan, entries)
    assert keys == [1.0, 3.0, 5.0, 6.0] and counts == [1.0] * 4
    assert values == pytest.approx([10.0, 30 + 6.0, 50 + 6.0 + 20.0, 60 + 20.0])
    # Fewer than the window follow 3: all of it goes to these.
    plan = Cam(window=9).settle(a_plan([[0, 2, 5]], (7,)), entries, judged([0.0] * 7))
    assert numbers(plan, entries)[1] == pytest.approx([10.0, 30 + 10.0, 60 + 10.0 + 40.0 + 50.0])


def test_cam_gives_back_what_the_weighted_sum_loses() -> None:
    source = torch.Generator().manual_seed(6)
    values, mass = torch.randn(12, 8, generator=source), torch.rand(12, generator=source)
    mass[[2, 3, 6]] *= 0.1  # less than those that follow: no share is clamped
    places = torch.arange(12, dtype=torch.int32)
    entries = Entries(values, values, places, (0,), (12,), {"mass": mass})
    kept = [0, 1, 4, 5, 7, 8, 9, 10, 11]
    plan = Cam(window=4).settle(a_plan([kept], (12,)), entries, judged([0.0] * 12))
    merged, now = folded(plan, entries), values.clone()
    now[merged.targets] = merged.values
    torch.testing.assert_close(mass[kept] @ now[kept], mass @ values)


def test_cam_without_mass_around() -> None:
    entries = line([0, 1, 2], [1.0, 2.0, 3.0], [1] * 3)
    for mass, expected in ([0.0, 0.0, 0.0], 30.0), ([0.0, 0.5, 0.0], 50.0):
        held, plan = with_mass(entries, mass), a_plan([[0, 2]], (3,))
        plan = Cam().settle(plan, held, judged([0.0] * 3))
        assert numbers(plan, held)[1] == pytest.approx([10.0, expected])


def test_sampled_cam_is_expected_cam_on_average() -> None:
    entries = with_mass(line([0, 41, 50], [1.0, 2.0, 3.0], [1] * 3), [0.0, 0.3, 1.0])
    plan, scored = a_plan([[0, 2]], (3,)), judged([0.0] * 3)
    drawn = [
        Cam(merge=Merge.SAMPLED, seed=seed).settle(plan, entries, scored) for seed in range(100)
    ]
    joined = [numbers(one, entries)[1][1] for one in drawn]
    assert set(joined) == {30.0, 50.0}
    # Three standard deviations of 20 * .46 / 10.
    assert sum(joined) / 100 == pytest.approx(36.0, abs=2.8)
    again = Cam(merge=Merge.SAMPLED, seed=3).settle(plan, entries, scored)
    assert numbers(again, entries)[1][1] == joined[3]


def test_the_luck_of_positions_is_even() -> None:
    places = torch.arange(0, 2000, dtype=torch.int32)
    entries = Entries(
        torch.ones(2000, 1), torch.ones(2000, 1), places, (0,), (2000,), {"mass": torch.ones(2000)}
    )
    entries.columns["mass"][:-1] = 0.25
    plan = Cam(merge=Merge.SAMPLED).settle(a_plan([[1999]], (2000,)), entries, judged([0.0] * 2000))
    assert abs(len(plan.folds) - 1 - 500) < 60  # 3 standard deviations of 19


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_out_of_range_is_refused(window) -> None:
    with pytest.raises(BadParameter, match=r"cam\.window must be at least 1"):
        Cam(window=window)
