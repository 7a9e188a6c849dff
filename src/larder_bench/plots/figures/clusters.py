"""Map of a conversation's segments and their episodes, each with its topics.

The map was computed when the row was written (t-SNE of the embeddings). Framed marks are the
segments of an episode's prompt; the most representative one of each episode is quoted. EpiCache's
stage 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from larder_bench.plots import score_groups
from larder_bench.plots.figures.base import Figure, PolicyStyles, drawing_name
from larder_bench.plots.layout import axes_at, overlay_axes, wrap_text
from larder_bench.plots.policy_styles import COLORS, MARKERS
from larder_bench.plots.style import FAINT, INK, PAGE, PAPER, SMALL, SOFT, Drawing, figure_style
from larder_bench.results.rows import Results, Row

MAP, TOP, BOTTOM = 2.9, 0.12, 0.12  # inches
BESIDE = 0.28  # inches between the map and its text
LEAD = 0.118  # inches from line to line
QUOTED = 2  # maximum lines of a quoted segment


@dataclass(frozen=True)
class ClustersFigure(Figure):
    """Map of episodes."""

    def draw(self, results: Results, styles: PolicyStyles) -> list[Drawing]:
        rows = [row for row in results.exhibits_of("clusters") if row["policy"] in styles]
        if not rows:
            raise self.nothing("rows of kind 'clusters'")
        return [
            Drawing(
                drawing_name("clusters", index, len(rows)),
                f"Episodes of {row['task']}, {row['context_tokens']:,} tokens",
                _caption(row),
                _figure(row),
            )
            for index, row in enumerate(rows)
        ]


def representative_text(row: Row, episode: int) -> str:
    """Text of the representative segment nearest to its episode's centroid."""
    segments = [s for s in row["segments"] if s["episode"] == episode and s["representative"]]
    if not segments:
        return ""
    return max(segments, key=lambda segment: segment["similarity"])["text"]


def _figure(row: Row) -> Any:
    from matplotlib.figure import Figure as Sheet

    texts = [_episode_lines(row, index) for index in range(len(row["episodes"]))]
    text_height = sum(len(lines) + 0.75 for _, lines in texts) * LEAD
    height = max(MAP, text_height) + TOP + BOTTOM
    with figure_style():
        figure = Sheet(figsize=(PAGE, height))
        side = height - TOP - BOTTOM
        axes = axes_at(figure, 0.06, BOTTOM + (side - MAP) / 2, MAP, MAP)
        for index in range(len(texts)):
            _dots(axes, row, index)
        _frame(axes)
        _words(figure, texts, height)
    return figure


def _dots(axes: Any, row: Row, number: int) -> None:
    color, marker = COLORS[number % len(COLORS)][0], MARKERS[number % len(MARKERS)]
    segments = [segment for segment in row["segments"] if segment["episode"] == number]
    for chosen, size in ((False, 12), (True, 20)):
        part = [segment for segment in segments if segment["representative"] is chosen]
        axes.scatter(
            [segment["x"] for segment in part],
            [segment["y"] for segment in part],
            s=size,
            marker=marker,
            color=color,
            alpha=1.0 if chosen else 0.6,
            edgecolors=INK if chosen else PAPER,
            linewidths=0.7 if chosen else 0.3,
            zorder=3 if chosen else 2,
            label=f"episode {number}" + (" representatives" if chosen else ""),
        )


def _frame(axes: Any) -> None:
    """Draw a frame without ticks: distances on the map have no unit."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.05)
    axes.set_aspect("equal", adjustable="datalim")
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(FAINT)
        spine.set_linewidth(0.5)


def _episode_lines(row: Row, number: int) -> tuple[str, list[str]]:
    """Headline and lines of text next to the map about an episode."""
    count = sum(segment["episode"] == number for segment in row["segments"])
    topics = ", ".join(row["episodes"][number]["topics"]) or f"episode {number + 1}"
    head = f"{topics} · {score_groups.count_noun(count, 'segment')}"
    width = PAGE - MAP - BESIDE - 0.35
    quote = " ".join(representative_text(row, number).split())
    lines = wrap_text(f"“{quote}”", width, SMALL, QUOTED) if quote else []
    if lines and not lines[-1].endswith("”"):
        lines[-1] += "”"
    return head, [wrap_text(head, 0.88 * width, SMALL, 1)[0], *lines]


def _words(figure: Any, texts: list[tuple[str, list[str]]], height: float) -> None:
    overlay = overlay_axes(figure)
    left = 0.06 + MAP + BESIDE
    block = sum(len(lines) + 0.75 for _, lines in texts) * LEAD - 0.75 * LEAD
    y = height / 2 + block / 2 - LEAD / 2
    for number, (_, lines) in enumerate(texts):
        color, dark = COLORS[number % len(COLORS)]
        marker = MARKERS[number % len(MARKERS)]
        overlay.plot([left - 0.1], [y], marker=marker, color=color, markersize=4, linestyle="none")
        for index, line in enumerate(lines):
            font = {"color": dark, "weight": "bold"} if index == 0 else {"color": SOFT}
            overlay.text(left, y, line, size=SMALL, va="center", **font)
            y -= LEAD
        y -= 0.75 * LEAD


def _caption(row: Row) -> str:
    chart = row["map"]
    return (
        f"{score_groups.count_noun(len(row['segments']), 'segment')} of a conversation of "
        f"{row['context_tokens']:,} tokens on a map by {chart['method']} (perplexity "
        f"{chart['perplexity']:g}, seed {chart['seed']}) of their embeddings "
        f"({row['embedder']}); color and shape are the episode. Framed marks are the segments that "
        "make its prompt, the one nearest to the centroid is quoted. Distances between groups have "
        "no meaning."
    )


Part = ClustersFigure
