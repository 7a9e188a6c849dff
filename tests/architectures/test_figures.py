"""Figures of the support table: committed for every family, and measured again where slow."""

from __future__ import annotations

import pytest

from architectures.families import Family, Status, with_status
from architectures.figures import DTYPES, committed, measured, misses
from covering import covering

SUPPORTED = with_status(Status.SUPPORTED)
# One of each kind of layers: full, sliding, latents, convolutions.
FAST = ("Llama", "Gemma 3", "MiniCPM3", "LFM2")
FEW_STEPS = 8


def test_committed_figures_match_the_support_table() -> None:
    known = committed()
    assert list(known) == [family.name for family in SUPPORTED]
    for name, by_dtype in known.items():
        assert list(by_dtype) == list(DTYPES)
        for dtype, found in by_dtype.items():
            assert misses(found, dtype) == [], (name, dtype)


@pytest.mark.parametrize(("name", "dtype"), covering(FAST, DTYPES))
def test_family_of_each_kind_meets_its_figures_in_few_steps(name: str, dtype: str) -> None:
    family = next(family for family in SUPPORTED if family.name == name)
    found = measured(family, dtype, FEW_STEPS, with_peak=False)
    assert misses(found, dtype, FEW_STEPS) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SUPPORTED, ids=lambda family: family.name)
def test_every_family_meets_its_figures(family: Family, dtype: str) -> None:
    assert misses(measured(family, dtype), dtype) == []


def test_misses_are_found() -> None:
    from dataclasses import replace

    good = committed()["Llama"]["bfloat16"]
    bad = replace(good, beyond=2, equal_steps=60, tie_margin=0.2, policies=3, peak=1.1)
    assert len(misses(bad, "bfloat16")) == 4
    assert misses(replace(good, beyond=1), "float32")
