"""The card tells what the rows hold, and of what the model was made."""

from __future__ import annotations

import json

from training.model_card import card, scores_of, table
from training.model_config import initialize_model

ROWS = [
    {"policy": "full", "task": "lookup()", "tokens": 1000, "items": [{"exact": 1}, {"exact": 0}]},
    {"policy": "full", "task": "lookup()", "tokens": 1000, "items": [{"exact": True}] * 2},
    {"policy": "full", "task": "ledger()", "tokens": 4000, "items": [{"exact": False}]},
    {"policy": "random", "task": "ledger()", "tokens": 4000, "items": [{"exact": True}]},
]


def test_answers_of_the_full_cache_are_counted_by_task_and_length():
    assert table(scores_of(ROWS)) == [
        "| task | 1000 | 4000 |",
        "| --- | --- | --- |",
        "| `lookup()` | 0.75 (4) |  |",
        "| `ledger()` |  | 0.00 (1) |",
    ]


def test_the_card_says_shape_and_training(tmp_path):
    initialize_model("tiny").save_pretrained(tmp_path)
    lines = [{"context": 2048, "tokens": 3e6}, {"context": 512, "tokens": 7e6}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = " ".join(card(tmp_path, ROWS, "Made on a boat.").split())
    assert "2 layers, 2 query and 1 kv heads of 16, vocabulary 4096" in text
    assert "7 million tokens, context 512 to 2048. Made on a boat. Exact match" in text
    assert "CPU" not in text and "going on" not in text  # the log does not tell
    assert "| `lookup()` | 0.75 (4) | |" in text
    assert "tell little about policies: `ledger()` at 4000." in text
    assert "CC BY-SA 4.0" in text
