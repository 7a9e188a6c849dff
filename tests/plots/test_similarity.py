"""The profile of a model by layer, from cells."""

from __future__ import annotations

from pathlib import Path

from larder_bench.plots.figure_selection import draw_all, draw_figures, load_results, parse_figure
from result_rows import cell, write_rows


def test_similarity_is_drawn_by_layer_with_intervals_over_texts(tmp_path: Path) -> None:
    less = [item | {"similarity": item["similarity"] / 2} for item in cell("full")["items"]]
    path = write_rows(tmp_path, [cell("full"), cell("full", seed=1, items=less), cell("h2o")])
    [(label, panel)] = parse_figure("similarity").charts(*load_results([path]))  # pyright: ignore
    [line] = panel.lines
    assert (label, line.name, line.xs) == ("", "needles, 1,000", (0.0, 1.0, 2.0, 3.0))
    assert (line.lows[1], line.ys[1], line.highs[1]) == (0.4375, 0.65625, 0.875)
    one = write_rows(tmp_path, [cell("full")])
    [drawing] = draw_figures([parse_figure("similarity")], *load_results([one]))
    [shown] = [line.get_data() for line in drawing.figure.axes[0].lines[:1]]
    assert list(shown[1]) == [1.0, 0.875, 0.75, 0.625]


def test_similarity_rows_are_drawn_without_a_quality_figure(tmp_path: Path) -> None:
    layers = [{"question": n, "similarity": 1 - n / 8, "counts": True} for n in range(3)]
    found = load_results([write_rows(tmp_path, [cell("full", items=layers, latency={})])])
    assert [one.name for one in draw_all(*found)] == ["latency", "similarity"]
