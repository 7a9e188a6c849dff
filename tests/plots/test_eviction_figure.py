"""The figure of eviction policies shows shares of possible savings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from larder_bench.plots.figure_selection import draw_figures, load_results, parse_figure
from result_rows import EXHIBITS, exhibit, write_rows


def points(spelling: str, path: Path) -> list[tuple[float, float]]:
    [one] = draw_figures([parse_figure(spelling)], *load_results([path], ()))
    figure: Any = one.figure
    found = [line for axes in figure.axes for line in axes.lines if line.get_label() == "lru"]
    return [point for line in found for point in zip(*line.get_data(), strict=True)]


def test_eviction_shows_what_is_saved_of_what_could_be(tmp_path: Path) -> None:
    path = write_rows(tmp_path, EXHIBITS)
    assert points("eviction", path) == [(0.25, 0.125), (0.5, 0.25)]
    assert points('eviction(saved="tokens")', path) == [(0.25, 0.2), (0.5, 0.4)]
    idle = dict.fromkeys(("hit_tokens", "known_tokens", "hit_seconds", "known_seconds"), 0)
    more = [*EXHIBITS, exhibit("eviction", "lru", needed_share=1.0, **idle)]  # nothing comes twice
    assert points("eviction", write_rows(tmp_path, more)) == [(0.25, 0.125), (0.5, 0.25)]
