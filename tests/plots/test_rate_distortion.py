"""Divergence against bytes, from cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder_bench.plots.figure_selection import draw_figures, load_results, parse_figure
from larder_bench.plots.figures.base import NothingToDraw
from larder_bench.results.rows import Row
from result_rows import cell, write_rows


def held(policy: str, budget: str, share: float, seed: int, nats: tuple[float, float]) -> Row:
    """Cell with two items of each kind."""
    items = [
        {"kind": kind, "question": number, "kl": own * (0.5 + number), "counts": True}
        for kind, own in zip(("next", "recited"), nats, strict=True)
        for number in range(2)
    ]
    bytes_held = int(100_000 * share)
    return cell(policy, seed=seed, items=items, measure="divergence", latency={}) | {
        "budget": budget,
        "active_kv_bytes": bytes_held,
    }


def test_points_are_means_over_files_at_the_bytes_held(tmp_path: Path) -> None:
    rows = [
        held("larder", "1/8", 0.12, 0, (0.01, 0.02)),
        held("larder", "1/8", 0.12, 1, (0.03, 0.02)),
        held("larder", "1/16", 0.06, 0, (0.1, 0.2)),
        held("kvzip", "1/8", 0.125, 0, (0.4, 0.8)),
        cell("full", items=[]),
    ]
    found = load_results([write_rows(tmp_path, rows)])
    [drawing] = draw_figures([parse_figure("rate_distortion")], *found)
    _legend, following, recited = drawing.figure.axes
    points = {line.get_label(): line.get_data() for line in following.lines}
    assert list(points["larder"][0]) == [0.06, 0.12]
    assert list(points["larder"][1]) == pytest.approx([0.1, 0.02])
    assert list(points["kvzip"][1]) == pytest.approx([0.4])
    own = {line.get_label(): line.get_data() for line in recited.lines}
    assert list(own["larder"][1]) == pytest.approx([0.2, 0.02])
    assert following.get_yscale() == recited.get_yscale() == "log"


def test_other_measures_have_no_such_figure(tmp_path: Path) -> None:
    found = load_results([write_rows(tmp_path, [cell("h2o")])])
    with pytest.raises(NothingToDraw, match="rate_distortion needs cells of the measure"):
        draw_figures([parse_figure("rate_distortion")], *found)
