"""Generator of a trained model's card: its scores with the full cache, from rows of `larder bench`.

larder bench --study model --corpus CORPUS --model MODEL --out ROWS python -m training.model_card
MODEL ROWS --made "Went on from an earlier model, on two CPU cores."
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from string import Template

from safetensors import safe_open
from transformers import AutoConfig

from larder_bench.results.rows import Row, existing_rows, read_results
from training.train import LOG

HALF = 0.5
FORM = Path(__file__).with_name("card.md")
Scores = dict[str, dict[int, list[float]]]  # by task, then by tokens of its texts


def scores_of(rows: Iterable[Row]) -> Scores:
    """Exact match of every answer with the full cache, or of every item of answers with items."""
    found: Scores = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["policy"] == "full":
            exact = [float(item["exact"]) for item in row["items"]]
            found[row["task"]][row["tokens"]] += exact
    return found


def table(scores: Scores) -> list[str]:
    """Table with a line per task and a column per length: the mean, and the number of scores in
    parentheses.
    """
    lengths = sorted({tokens for by_length in scores.values() for tokens in by_length})
    lines = [_line("task", *map(str, lengths)), _line(*["---"] * (1 + len(lengths)))]
    for task, by_length in scores.items():
        lines.append(_line(f"`{task}`", *(_formatted(by_length.get(n, ())) for n in lengths)))
    return lines


def weak_cells(scores: Scores) -> str:
    """Tasks and lengths with less than half right, where policies are hard to distinguish."""
    found = [
        f"`{task}` at {', '.join(map(str, lengths))}"
        for task, by_length in scores.items()
        if (lengths := [n for n, exact in by_length.items() if sum(exact) < HALF * len(exact)])
    ]
    return "; ".join(found) or "none of these"


def card(model: Path, rows: Iterable[Row], made: str = "") -> str:
    """Model card in Markdown.

    Args:
        model: folder of the model, with the log of its training if there is one.
        made: information about its training that the log lacks, in whole sentences.
    """
    config = AutoConfig.from_pretrained(model)
    log = existing_rows(model / LOG)
    scores = scores_of(rows)
    contexts = sorted({line["context"] for line in log})
    return Template(FORM.read_text(encoding="utf-8")).substitute(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        millions=round(_parameters(model) / 1e6, 1),
        tokens=round(log[-1]["tokens"] / 1e6) if log else "an unknown number of",
        contexts=f"{contexts[0]} to {contexts[-1]}" if contexts else "unknown",
        made=made,
        table="\n".join(table(scores)),
        weak=weak_cells(scores),
    )


def _parameters(model: Path) -> int:
    """Number of parameters of the weights."""
    with safe_open(model / "model.safetensors", "np") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _formatted(exact: Sequence[float]) -> str:
    return f"{sum(exact) / len(exact):.2f} ({len(exact)})" if exact else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model; its README.md is replaced")
    parser.add_argument("rows", type=Path, nargs="+", help="results of larder bench --study model")
    parser.add_argument(
        "--made", default="", help="where and from what it was trained, which no log has"
    )
    options = parser.parse_args()
    text = card(options.model, read_results(options.rows).measured, options.made)
    (options.model / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
