"""Mean pooling, one text at a time and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def slow_mean_rows(model: Any, tokenizer: Any, texts: list[str], max_tokens: int) -> np.ndarray:
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].tolist()
        mean = [sum(column) / len(ids) for column in zip(*states, strict=True)]
        length = math.sqrt(sum(x * x for x in mean))
        rows.append([x / length for x in mean])
    return np.array(rows, dtype=np.float32)
