"""The table: each peer beside ours, and by how much it takes more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from _pairs import Pair

from larder.bench.rows import Row

Number = Callable[[Row], float]
COSTS: dict[str, Number] = {
    "KV held": lambda row: row["kv_bytes"],
    "KV highest": lambda row: row["peak_kv_bytes"],
    "process on top": lambda row: row["working_peak_bytes"],
    "prefill": lambda row: row["prefill_seconds"],
    "first token": lambda row: row["latency"]["first_token"]["p50"],
    "token": lambda row: row["latency"]["token"]["p50"],
}


def lines(pairs: Sequence[Pair], rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: a line per pair and budget."""
    heads = ["peer", "Larder", "budget", "exact", *COSTS]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for pair in pairs:
        own = [row for row in rows if row["policy"] == pair.name]
        peers = [row for row in rows if row["policy"] == pair.peer]
        for budget in dict.fromkeys(row["budget"] for row in peers):
            cells = _cells(
                [row for row in peers if row["budget"] == budget],
                [row for row in own if row["budget"] == budget],
            )
            yield "| " + " | ".join([pair.peer, pair.name, budget, *cells]) + " |"


def _cells(peers: Sequence[Row], own: Sequence[Row]) -> list[str]:
    """Exact matches of both, and medians over conversations of what the peer takes of ours."""
    by_seed = {_place(row): row for row in own if "refused" not in row}
    both = [(row, by_seed[_place(row)]) for row in peers if _place(row) in by_seed]
    both = [(peer, mine) for peer, mine in both if "refused" not in peer]
    if not both:
        why = [row["refused"] for row in (*peers, *own) if "refused" in row]
        return [f"refused: {why[0][:120]}" if why else "not run", *[""] * len(COSTS)]
    costs = [_ratio(number, both) for number in COSTS.values()]
    return [f"{_exact([p for p, _ in both])} / {_exact([m for _, m in both])}", *costs]


def _place(row: Row) -> tuple[str, int, int]:
    return row["task"], row["tokens"], row["seed"]


def _exact(rows: Sequence[Row]) -> str:
    items = [item["exact"] for row in rows for item in row["items"] if item["counts"]]
    return f"{sum(items) / len(items):.2f}" if items else "-"


def _ratio(number: Number, both: Sequence[tuple[Row, Row]]) -> str:
    """Of the peer to ours; where ours takes nothing, what the peer takes."""
    try:
        found = [number(peer) / number(mine) for peer, mine in both]
    except (KeyError, ZeroDivisionError):
        return "-"
    return f"{statistics.median(found):.2f}x"
