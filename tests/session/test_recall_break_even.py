"""Break-even of recall: measured once per machine, saved, and named in the policy that runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_spec
from larder import Engine, LarderCache
from larder.core import BadParameter, ModelSpec, UsageError
from larder.recall import Dci, Flat
from larder.session import (
    MAX_ENTRIES,
    Policy,
    break_even,
    crossing,
    measure_break_even,
    recall_break_even,
    with_measured_recall,
)
from tiny_models import tiny

SPEC = a_spec(a_layer())


@pytest.fixture
def measured(monkeypatch) -> list[object]:
    """Recall parts that were measured, each with a break-even of 700 entries."""
    seen = list[object]()

    def measure(recall, layer, dtype) -> int:
        del layer, dtype
        seen.append(recall)
        return 700

    monkeypatch.delenv("LARDER_RECALL_BREAK_EVEN")
    monkeypatch.setattr(recall_break_even, "measure_break_even", measure)
    return seen


def test_break_even_is_measured_once_per_index_and_saved(measured, larder_home):
    assert [break_even(Dci(tokens=64), SPEC) for _ in range(2)] == [700, 700]
    assert break_even(Dci(tokens=128), SPEC) == 700
    assert measured == [Dci(tokens=64), Dci(tokens=128)]
    (file,) = (larder_home / "break_even").glob("*.json")
    assert list(json.loads(file.read_text()).values()) == [700, 700]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "{",
        lambda text: "[" * 100_000,
        lambda text: "[700]",
        *(
            partial(re.sub, "700", number)
            for number in ('"700"', "null", "-1", "3.5", "true", "1e400", "[7]", str(10**30))
        ),
    ],
)
def test_damaged_measurement_file_is_replaced(measured, larder_home, damage):
    break_even(Dci(tokens=64), SPEC)
    (file,) = (larder_home / "break_even").glob("*.json")
    file.write_text(damage(file.read_text()))
    assert break_even(Dci(tokens=64), SPEC) == 700
    assert len(measured) == 2


def test_read_only_home_measures_every_time(measured, larder_home):
    larder_home.mkdir(exist_ok=True)
    (larder_home / "break_even").write_text("a file where the folder would be")
    assert [break_even(Dci(tokens=64), SPEC) for _ in range(2)] == [700, 700]
    assert len(measured) == 2


def test_concurrently_saved_measurements_are_kept(measured, monkeypatch, larder_home):
    def measure(recall, layer, dtype) -> int:
        monkeypatch.setattr(recall_break_even, "measure_break_even", lambda *_: 300)
        assert break_even(Dci(tokens=128), SPEC) == 300
        return 200

    monkeypatch.setattr(recall_break_even, "measure_break_even", measure)
    break_even(Dci(tokens=64), SPEC)
    (file,) = (larder_home / "break_even").glob("*.json")
    assert sorted(json.loads(file.read_text()).values()) == [200, 300]


def test_policy_spelling_has_the_measured_length(measured):
    policy = with_measured_recall(Policy.parse("icecache"), SPEC)
    assert policy.recall == replace(Policy.parse("icecache").recall, exact=700)
    assert "exact=700" in str(policy)
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "spelling",
    ["full", "icecache_ahead", str(Policy.parse("icecache")).replace("dci(", "dci(exact=9, ")],
)
def test_other_policies_are_unchanged(measured, spelling):
    policy = Policy.parse(spelling)
    assert with_measured_recall(policy, SPEC) == policy
    assert measured == []


def test_engines_and_caches_use_the_measured_length(measured):
    model = tiny("llama")
    assert LarderCache(model, "icecache", 64).policy.recall.exact == 700
    engine = Engine.load(policy="icecache", budget=64)
    assert engine.policy.recall.exact == 700


def test_accelerator_models_are_not_measured(measured):
    far = ModelSpec(SPEC.layers, torch.float32, torch.device("meta"))
    assert with_measured_recall(Policy.parse("icecache"), far) == Policy.parse("icecache")
    assert measured == []


@pytest.mark.parametrize(("given", "expected"), [("0", None), ("4096", 4096)])
def test_environment_overrides_the_measurement(monkeypatch, given, expected):
    monkeypatch.setenv("LARDER_RECALL_BREAK_EVEN", given)
    assert with_measured_recall(Policy.parse("icecache"), SPEC).recall.exact == expected


def test_invalid_environment_value_is_an_error(monkeypatch):
    monkeypatch.setenv("LARDER_RECALL_BREAK_EVEN", "many")
    with pytest.raises(UsageError, match="LARDER_RECALL_BREAK_EVEN is 'many'"):
        break_even(Dci(), SPEC)


@given(power=st.floats(0.1, 0.7), scale=st.floats(1e-3, 1e3), exact=st.integers(1 << 11, 1 << 17))
def test_crossing_of_two_power_laws_equals_its_exact_length(power, scale, exact):
    def seconds(length: int) -> tuple[int, float, float]:
        return length, scale * length, scale * exact * (length / exact) ** power

    times = [seconds(length) for length in (1024, 4096, 16384) if length / 4 < exact]
    assert crossing(times) == pytest.approx(exact, rel=1e-2)


def test_crossing_without_gain_is_the_maximum():
    assert crossing([(1024, 1.0, 2.0), (4096, 2.0, 4.0)]) == MAX_ENTRIES


@given(shares=st.lists(st.floats(1e-9, 1e9), min_size=6, max_size=6))
def test_crossing_of_any_times_is_in_range(shares):
    times = list(zip((1024, 4096, 16384), shares[:3], shares[3:], strict=True))
    for count in (1, 2, 3):
        assert 0 <= crossing(times[:count]) <= MAX_ENTRIES


def test_crossing_of_nearly_parallel_times_is_the_maximum():
    assert crossing([(1024, 1.0, 2.0), (4096, 4.0, 8.0 - 1e-9)]) == MAX_ENTRIES


def test_measured_break_even_is_in_range(monkeypatch):
    monkeypatch.setattr(recall_break_even, "LENGTHS", (16, 32))
    monkeypatch.setattr(recall_break_even, "EVICTED_FLOATS", 16)
    assert 0 < measure_break_even(Flat(tokens=8), a_layer(), torch.float32) <= MAX_ENTRIES


@pytest.mark.parametrize("options", [{"layers": 3}, {"corrected": 2}])
def test_approximate_options_refuse_an_exact_length(options):
    with pytest.raises(BadParameter, match="dci.exact must be 0 or open"):
        Dci(exact=5, **options)
