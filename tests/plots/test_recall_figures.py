"""Figures of two tiers, and of recall by step."""

from __future__ import annotations

from pathlib import Path

from larder_bench.plots.figure_selection import draw_figures, load_results, parse_figure
from result_rows import cell, exhibit, write_rows


def test_slow_tier_has_its_own_panel(tmp_path: Path) -> None:
    held = {"active_kv_bytes": 40_000, "slow_kv_bytes": 90_000, "peak_kv_bytes": 130_000}
    rows = [cell("icecache", tokens=tokens) | held for tokens in (1000, 2000)]
    path = write_rows(tmp_path, [*rows, *(cell("h2o", tokens=n) for n in (1000, 2000))])
    [(_, panels)] = parse_figure("memory").charts(*load_results([path]))  # pyright: ignore
    assert [panel.title.rpartition(", ")[2] for panel in panels] == ["fast tier", "both tiers"]
    ys = [{line.name: line.ys for line in panel.lines}["icecache"] for panel in panels]
    assert ys == [(40_000, 40_000), (130_000, 130_000)]


def test_recall_by_step_keeps_layers_and_budgets_apart(tmp_path: Path) -> None:
    rows = [
        exhibit("recall", "dci", budget=budget, fetched_tokens=64, layer=layer, step=step)
        | {"recall": {"1": 0.5 + 0.1 * step if layer else 0.0}}
        for budget in ("256", "128")
        for layer, step in ((None, None), (2, 1), (2, 2))
    ]
    results = load_results([write_rows(tmp_path, rows)])
    [(_, panels)] = parse_figure("recall(along='step')").charts(*results)  # pyright: ignore
    assert [panel.title for panel in panels] == [f"recall@1, layer 2, {n}" for n in (256, 128)]
    assert panels[0].lines[0].ys == (0.6, 0.7)
    [(_, [whole])] = parse_figure("recall").charts(*results)  # pyright: ignore
    assert whole.title == "recall@1" and whole.lines[0].ys == (0.0,)


def test_parts_of_decode_steps_are_in_one_order(tmp_path: Path) -> None:
    steps = {"h2o": ("attention", "model"), "d2o": ("attention", "evict", "model")}
    rows = [
        exhibit("breakdown", policy, step="step")
        | {"parts": [{"name": name, "p50": 0.25} for name in names]}
        for policy, names in steps.items()
    ]
    [one] = draw_figures([parse_figure("latency")], *load_results([write_rows(tmp_path, rows)]))
    words = [text.get_text() for axes in one.figure.axes for text in axes.texts]
    assert [w for w in words if w in steps["d2o"]] == list(steps["d2o"])


def test_parts_at_equal_bytes_and_at_equal_tokens_have_separate_figures(tmp_path: Path) -> None:
    rows = [
        exhibit("breakdown", policy, step="step", budget=budget, matched=matched, measure="decode")
        | {"parts": [{"name": "model", "p50": seconds}]}
        for policy, budget, matched, seconds in (
            ("h2o", "1/4", "bytes", 0.25),
            ("h2o", "1/4", "tokens", 0.5),
            ("full", "1/1", "bytes", 1.0),  # the same at either, and measured once
        )
    ]
    rows.append(rows[-1] | {"measure": "reading"})
    drawn = draw_figures([parse_figure("latency")], *load_results([write_rows(tmp_path, rows)]))
    assert [one.title.partition("needles, ")[2] for one in drawn] == [
        "equal bytes, decode, step",
        "equal tokens, decode, step",
        "equal bytes, reading, step",
    ]
    widths = [[bar.get_width() for bar in one.figure.axes[0].patches] for one in drawn]
    assert widths == [[0.25, 1.0], [0.5, 1.0], [1.0]]
