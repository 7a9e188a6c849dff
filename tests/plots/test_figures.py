"""Figures show the contents of rows, always in the same bytes, and no text overlaps another."""

from __future__ import annotations

import builtins
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from larder import LarderError
from larder.core import DependencyError, InputError, UnknownName
from larder_bench.plots.figure_selection import (
    FIGURE_ORDER,
    draw_all,
    draw_figures,
    load_results,
    parse_figure,
)
from larder_bench.plots.figures.base import FIGURES, NothingToDraw
from larder_bench.plots.layout import spread_labels, text_width, wrap_text
from larder_bench.plots.policy_styles import COLORS, PALE, assign_styles, styles_for
from larder_bench.plots.style import COLUMN, PAGE, Drawing, ImageFormat, figure_style
from result_rows import CELLS, EXHIBITS, SCORES, cell, exhibit, write_rows


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_rows(tmp_path, CELLS + EXHIBITS)


def drawn(spelling: str, path: Path, *policies: str) -> list[Drawing]:
    return draw_figures([parse_figure(spelling)], *load_results([path], policies))


def lines(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """Points of each named line, over all panels."""
    found: dict[str, list[tuple[float, float]]] = {}
    for axes in figure.axes:
        for line in axes.lines:
            if not (name := line.get_label()).startswith("_"):
                found.setdefault(name, []).extend(zip(*line.get_data(), strict=True))
    return found


def clashes(figure: Any) -> list[str]:
    """Texts that leave the figure or overlap."""
    figure.draw_without_rendering()
    frame = figure.bbox
    texts = [text for text in figure.findobj(match=lambda a: hasattr(a, "get_text")) if shown(text)]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    out = [t for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > frame.x1 + 1 or b.y1 > frame.y1]
    over = [
        f"{one} / {two}"
        for (one, a), (two, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 3
    ]
    return out + over


def shown(text: Any) -> bool:
    inside = text.axes is None or text.axes.axison or text in text.axes.texts
    return bool(text.get_text().strip()) and text.get_visible() and inside


def test_figure_order_has_every_figure() -> None:
    assert sorted(FIGURE_ORDER) == FIGURES.names()


@pytest.mark.extended
def test_every_figure_is_drawn_in_the_same_bytes_without_a_clash(tmp_path: Path) -> None:
    kinds = ("next", "recited")
    items = [{"kind": kind, "question": 0, "kl": 0.1, "counts": True} for kind in kinds]
    reading = cell("snapkv", items=items, measure="divergence", latency={})
    rows = [*CELLS, *EXHIBITS, *(reading | {"budget": budget} for budget in ("1/8", "1/16"))]
    results = write_rows(tmp_path, rows)
    first, second = (draw_all(*load_results([results])) for _ in range(2))
    assert {one.name.partition("-")[0] for one in first} == {*FIGURE_ORDER, "breakdown"}
    for one, other in zip(first, second, strict=True):
        svg = one.save(ImageFormat.SVG)
        assert svg == other.save(ImageFormat.SVG)
        assert b"<dc:date>" not in svg and b"<text" in svg and b"<image" not in svg
        assert one.figure.get_size_inches()[0] in (COLUMN, PAGE)
        with figure_style():
            assert clashes(one.figure) == [], one.name


def test_png_figure_is_byte_identical_when_drawn_again(results: Path) -> None:
    first, second = (drawn("recall", results)[0].save(ImageFormat.PNG) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG")


def test_overlapping_labels_are_found() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3, 3))
    for place in (0.5, 0.51, 0.99):
        figure.text(place, place, "words")
    assert clashes(figure) == ["words", "words / words"]


def test_quality_shows_means_at_the_bytes_held(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [row for row in CELLS if row["tokens"] == 1000])
    [one] = drawn("quality", path)
    found = lines(one.figure)
    assert [y for _, y in found["snapkv"]] == [0.5]
    assert [y for _, y in found["h2o"]] == [0.25]
    assert {y for _, y in found["full"]} == {1.0}
    assert found["snapkv"][0][0] == pytest.approx(0.25, rel=0.05)
    [held] = drawn('quality(bytes="held")', path)
    assert lines(held.figure)["h2o"][0][0] == pytest.approx(0.5, rel=0.05)


def test_continuous_scores_are_drawn_separately(tmp_path: Path) -> None:
    items = [
        {"kind": "token", "kl": 0.5, "same": n > 0, "mass": 0.75, "counts": True} for n in (0, 1)
    ]
    rows = [cell(name, items=items, measure="fidelity") for name in ("snapkv", "full")]
    drawings = drawn("quality", write_rows(tmp_path, rows))
    assert [one.title.partition(" against")[0] for one in drawings] == (
        ["KL divergence from the full cache (nats)", "Top-1 agreement with the full cache"]
        + ["Attention kept"]
    )
    means = [lines(one.figure)["snapkv"][0][1] for one in drawings]
    assert means == [0.5, 0.5, 0.75]
    assert all(one.name == f"quality-{n}" for n, one in enumerate(drawings, start=1))
    assert "equal in bytes of the cache that answers" in drawings[0].caption
    assert len(drawn('quality(score="mass")', write_rows(tmp_path, rows))) == 1


def test_controls_at_one_budget_are_labeled_horizontal_lines(tmp_path: Path) -> None:
    rows = [cell(name, task=task) for task in ("a()", "b()") for name in (*SCORES, "rag_2k")]
    [one] = drawn("quality", write_rows(tmp_path, rows))
    found = lines(one.figure)
    for control in ("random", "rag_2k", "full"):
        assert [x for x, _ in found[control]] == [0, 1, 0, 1]
    with figure_style():
        assert clashes(one.figure) == []
    words = [text.get_text() for text in one.figure.findobj(match=lambda a: hasattr(a, "get_text"))]
    for control in ("random", "rag_2k", "full cache"):
        assert words.count(control) == 2  # beside each panel, and not in the legend
    assert words.count("h2o") == 1
    more = [cell("random") | {"budget": b} for b in ("1/4", "1/8")]
    [other] = drawn("quality", write_rows(tmp_path, [*more, cell("h2o")]))
    assert {x for x, _ in lines(other.figure)["random"]}.isdisjoint({0, 1})


def test_quality_bars_are_bootstrap_intervals(tmp_path: Path) -> None:
    wrong = [item | {"exact": False} for item in cell("h2o")["items"]]
    path = write_rows(tmp_path, [cell("h2o", seed=0), cell("h2o", seed=1, items=wrong)])
    [(_, [scored])] = parse_figure("quality").charts(*load_results([path]))  # pyright: ignore
    [point] = scored.points["h2o"]
    assert (point.score.mean, point.score.low, point.score.high) == (0.125, 0.0, 0.25)
    assert (scored.files, scored.items, scored.full) == (2, 8, None)


def test_items_that_do_not_count_or_are_of_another_kind_are_left_out(tmp_path: Path) -> None:
    items = [
        {"kind": "a", "exact": True, "counts": True},
        {"kind": "b", "exact": False, "counts": True},
        {"kind": "a", "exact": False, "counts": False},
    ]
    path = write_rows(tmp_path, [cell("h2o", items=items)])
    [one] = drawn('quality(kind="a")', path)
    assert [y for _, y in lines(one.figure)["h2o"]] == [1.0]


def test_grid_has_a_cell_for_each_depth_and_length(results: Path) -> None:
    [(chart)] = parse_figure("grid(depths=4)").charts(*load_results([results]))  # pyright: ignore
    assert chart.lengths == (1000, 2000)
    by_policy = {panel.policy: panel.means for panel in chart.panels}
    assert by_policy["snapkv"] == ((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    assert list(by_policy)[0] == "full"
    [one] = drawn("grid(depths=8)", results)
    assert "4 items" not in one.caption and "2 items per cell" in one.caption


def test_memory_figure_has_bytes_by_length_and_the_full_cache(results: Path) -> None:
    [one] = drawn("memory", results)
    found = lines(one.figure)
    assert found["h2o"] == [(1000, 75_000), (2000, 150_000)]
    assert found["full"] == [(1000, 100_000), (2000, 200_000)]


def test_latency_uses_the_longest_text_with_stacked_parts(results: Path) -> None:
    dots, stacks = drawn("latency", results, "snapkv")
    assert "2,000 tokens" in dots.title
    first = [line.get_data() for line in dots.figure.axes[1].lines]
    assert list(first[0][0]) == [500.0, 750.0]
    bars = [(bar.get_x(), bar.get_width()) for bar in stacks.figure.axes[0].patches]
    assert bars == [(0.0, 250.0), (250.0, 500.0)]


def test_latency_leaves_out_readings_that_were_not_timed(tmp_path: Path) -> None:
    untimed = cell("snapkv", measure="divergence", latency={}, prefill_seconds=0.0)
    result = draw_all(*load_results([write_rows(tmp_path, [untimed])]))
    assert "latency" not in {one.name.partition("-")[0] for one in result}


def test_budget_figure_has_gaps_for_sliding_window_layers(results: Path) -> None:
    [(_, [panel])] = parse_figure("budgets").charts(*load_results([results]))  # pyright: ignore
    assert panel.lengths == ((10.0, 30.0), (None, None), (20.0, 40.0))
    assert panel.layers == (20.0, None, 30.0)


def test_prompt_curve_is_drawn_over_similarity_percentiles(results: Path) -> None:
    [one] = drawn("prompt_curve", results)
    found = lines(one.figure)
    assert found["snapkv"] == [(5.0, 1.0), (95.0, 0.0)]
    assert {y for _, y in found["the question"]} == {1.0}


def test_recall_is_drawn_over_fetched_entries(results: Path) -> None:
    [one] = drawn("recall", results)
    assert lines(one.figure)["dci"] == [(16.0, 0.25), (32.0, 0.5)]
    with pytest.raises(NothingToDraw, match="rows of kind 'recall' with step"):
        drawn('recall(along="step")', results)


def test_cluster_map_has_every_segment_and_quotes_the_nearest(results: Path) -> None:
    [one] = drawn("clusters", results)
    points = {
        (x, y): dots.get_label()
        for dots in one.figure.axes[0].collections
        for x, y in dots.get_offsets().tolist()
    }
    assert len(points) == 8
    assert points[4.0, 1.0] == "episode 1 representatives" and points[1.0, 0.0] == "episode 0"
    texts = [text.get_text() for axes in one.figure.axes for text in axes.texts]
    assert "“Segment 0 says & asks little.”" in texts


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("qualty", "No figure named 'qualty'. Did you mean 'quality'?"),
        ("quality > grid", "takes one figure"),
        ("quality(", "does not parse"),
        ("grid(depths=0)", "grid.depths must be at least 1"),
        ('grid(score="kl")', "grid.score must be one of"),
        ('quality(bytes="all")', "quality.bytes must be one of 'active', 'held', 'peak'"),
        ('quality(score="f1")', "The items have no score 'f1': they have exact"),
    ],
)
def test_invalid_figure_is_refused(spelling: str, message: str, results: Path) -> None:
    with pytest.raises(LarderError, match=message.replace("(", r"\(")):
        drawn(spelling, results)


@pytest.mark.parametrize("name", FIGURE_ORDER)
def test_missing_rows_for_a_figure_are_named(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [exhibit("other") | {"row": "budgets", "episode": 0}])
    kept, seen = load_results([path])
    with pytest.raises(NothingToDraw, match=f"The figure {name} needs"):
        parse_figure(name).draw(type(kept)((), {}), seen)


def test_core_policies_are_ordered_first(tmp_path: Path) -> None:
    names = ("h2o", "icecache", "d2o", "random", "epicache")
    found = write_rows(tmp_path, [cell(name, 1000, 0) for name in names])
    assert list(load_results([found])[1]) == ["epicache", "d2o", "icecache", "h2o", "random"]
    assert list(load_results([found], ["h2o", "d2o"])[1]) == ["h2o", "d2o"]


def test_invalid_rows_and_missing_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a row of schema 1"):
        load_results([write_rows(tmp_path, [{"file": "old"}])])
    with pytest.raises(InputError, match="results.jsonl has a row 'recall' without"):
        load_results([write_rows(tmp_path, [{"schema": 1, "row": "recall"}])])
    with pytest.raises(InputError, match="no measurements"):
        load_results([write_rows(tmp_path, [])])
    with pytest.raises(UnknownName, match="No policy in the results files named 'h20'"):
        load_results([write_rows(tmp_path, CELLS)], ["h20"])


def test_chosen_policies_come_in_their_order_beside_the_full_cache(results: Path) -> None:
    kept, seen = load_results([results], ["snapkv", "h2o"])
    assert list(seen) == ["snapkv", "h2o", "full"]
    assert {row["policy"] for row in kept.cells} == set(seen)


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DependencyError, match=r"pip install 'larder\[bench\]'"), figure_style():
        pass


def test_policies_beyond_the_palette_are_pale_and_borrow_free_colors() -> None:
    names = [f"p{number}" for number in range(len(COLORS) + 2)]
    found = assign_styles([*names, "random"])
    assert [found[name].color for name in names[-2:]] == [PALE, PALE]
    assert not found["random"].marker and found["random"].is_labeled
    lent = styles_for(found, {"p0", names[-1]})
    assert lent["p0"] == found["p0"] and lent[names[-1]].color == COLORS[1][0]


def test_labels_are_spread_in_order_near_their_lines() -> None:
    places = spread_labels([0.5, 0.5, 0.9], gap=0.1, low=0.0, high=1.0)
    assert places == pytest.approx([0.45, 0.55, 0.9])
    assert spread_labels([1.0, 1.0], gap=0.1, low=0.0, high=1.0) == pytest.approx([0.9, 1.0])
    assert spread_labels([0.0, 0.0, 0.0], gap=9.0, low=0.0, high=1.0) == pytest.approx(
        [0.0, 0.5, 1.0]
    )


def test_text_is_wrapped_to_its_width() -> None:
    with figure_style():
        found = wrap_text("one two three four", text_width("one two ", 6.0), 6.0, most=2)
        assert found == ["one two", "three…"]
