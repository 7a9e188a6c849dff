"""Queries that a layer budget measures of a text, through a model."""

from __future__ import annotations

import pytest

from larder.core import Phase, Variant
from larder.policy import ColumnMass, Drop, InverseVariance, Planner, Protect
from larder.prefill.schedules import whole
from model_runs import some_ids


@pytest.mark.parametrize("variant, queries", [(Variant.LARDER, 16), (Variant.CODE, 50)])
def test_code_variant_measures_all_queries_of_a_whole_prefill(
    monkeypatch, watched, reader_for, lane_for, variant, queries
) -> None:
    monkeypatch.setattr(whole, "BLOCK_TOKENS", 16)
    planner = Planner(Protect(4, 0.25), ColumnMass(), InverseVariance(variant=variant), Drop())
    seen, measure = list[int](), InverseVariance.measure

    def counted(part, view, scores):
        assert view.phase is Phase.PREFILL
        seen.append(len(view.query_positions))
        return measure(part, view, scores)

    monkeypatch.setattr(InverseVariance, "measure", counted)
    reader, lane = reader_for(watched, planner, 24, 50), lane_for(watched, planner)
    whole.Whole().read(reader, [lane], some_ids(50), lambda *_: None)
    assert seen == [queries] * len(watched.spec.managed)
    assert lane.cache.managed_entries == 24 * sum(layer.kv_heads for layer in watched.spec.managed)
