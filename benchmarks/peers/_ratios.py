"""Tables of peers compared with Larder: scores, bytes, and ratios of times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from _pairs import PeerPair

from larder_bench.results.rows import Row

Number = Callable[[Row], float]
MIB = 2**20
SIZES: dict[str, str] = {
    "KV held": "kv_bytes",
    "KV highest": "peak_kv_bytes",
    "on top of the model": "working_peak_bytes",
    "process": "process_peak_bytes",
}
TIMES: dict[str, Number] = {
    "prefill": lambda row: row["prefill_seconds"],
    "prefill CPU": lambda row: row["prefill_cpu_seconds"],
    "first token": lambda row: row["latency"]["first_token"]["p50"],
    "token": lambda row: row["latency"]["token"]["p50"],
}
TABLE_KEYS = ("model", "device", "dtype", "task", "tokens", "measure", "question")
DEFAULTS = {"question": "after"}  # of fields that early rows lack
LONGEST_REFUSAL = 120
LEGEND = (
    "exact and MiB: peer / Larder, medians over conversations; times: what the peer takes, as a "
    "multiple of Larder"
)


def tables(pairs: Sequence[PeerPair], rows: Sequence[Row]) -> Iterator[str]:
    """Markdown tables of comparable rows, each under its common fields."""
    yield LEGEND
    rows = [DEFAULTS | row for row in rows]
    for place in dict.fromkeys(tuple(row[name] for name in TABLE_KEYS) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in TABLE_KEYS) == place]
        model, device, dtype, task, tokens, measure, question = place
        measure = measure if question == DEFAULTS["question"] else f"{measure}, question {question}"
        count = len({row["seed"] for row in group})
        yield ""
        yield f"{model} ({device}, {dtype}): {task}, {tokens:,} tokens, files {count}, {measure}"
        yield ""
        yield from lines(pairs, group)


def lines(pairs: Sequence[PeerPair], rows: Sequence[Row]) -> Iterator[str]:
    """Table with a line per pair and budget; pairs that were not run are left out."""
    heads = ["peer", "Larder", "budget", "exact", *(f"{name}, MiB" for name in SIZES), *TIMES]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for pair in pairs:
        ours = [row for row in rows if row["policy"] == pair.name]
        peers = [row for row in rows if row["policy"] == pair.peer]
        for budget in dict.fromkeys(row["budget"] for row in peers):
            cells = _cells(
                [row for row in peers if row["budget"] == budget],
                [row for row in ours if row["budget"] == budget],
            )
            yield "| " + " | ".join([pair.peer, pair.name, budget, *cells]) + " |"


def _cells(peer_rows: Sequence[Row], our_rows: Sequence[Row]) -> list[str]:
    """Cells of a line, over the conversations that both sides have read."""
    by_seed = {_place(row): row for row in our_rows if "refused" not in row}
    both = [(row, by_seed[_place(row)]) for row in peer_rows if _place(row) in by_seed]
    both = [(peer, ours) for peer, ours in both if "refused" not in peer]
    if not both:
        why = [row["refused"] for row in (*peer_rows, *our_rows) if "refused" in row]
        reason = why[0][:LONGEST_REFUSAL].replace("|", r"\|") if why else ""
        return [f"refused: {reason}" if why else "not run", *[""] * len([*SIZES, *TIMES])]
    theirs, ours = ([row for row, _ in both], [row for _, row in both])
    sizes = [f"{_mib(name, theirs)} / {_mib(name, ours)}" for name in SIZES.values()]
    times = [_ratio(number, both) for number in TIMES.values()]
    return [f"{_exact(theirs)} / {_exact(ours)}", *sizes, *times]


def _place(row: Row) -> tuple[str, int, int]:
    return row["task"], row["tokens"], row["seed"]


def _exact(rows: Sequence[Row]) -> str:
    items = [
        item.get("own", item["exact"]) for row in rows for item in row["items"] if item["counts"]
    ]
    return f"{sum(items) / len(items):.2f}" if items else "-"


def _mib(name: str, rows: Sequence[Row]) -> str:
    return f"{statistics.median(row[name] for row in rows) / MIB:.1f}"


def _ratio(number: Number, both: Sequence[tuple[Row, Row]]) -> str:
    """Median ratio of the peer to Larder; a dash if a row has no such time."""
    try:
        ratios = [number(peer) / number(ours) for peer, ours in both]
    except KeyError:
        return "-"
    return f"{statistics.median(ratios):.2f}x"
