"""The last token's hidden state, one text at a time, without padding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def slow_last_rows(model: Any, tokenizer: Any, texts: list[str], max_tokens: int) -> np.ndarray:
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        with torch.no_grad():
            last = model(torch.tensor([ids])).last_hidden_state[0][-1].tolist()
        length = math.sqrt(sum(x * x for x in last))
        rows.append([x / length for x in last])
    return np.array(rows, dtype=np.float32)
