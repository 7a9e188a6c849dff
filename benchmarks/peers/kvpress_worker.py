"""Runs NVIDIA/kvpress on one job: JSON in, JSON out. Started by side_by_side.py in kvpress's own
environment; needs torch, transformers and kvpress, nothing of Larder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import sys
import time
from typing import Any

import torch
import transformers
from kvpress import (
    AdaKVPress,
    KeyDiffPress,
    KVzipPress,
    RandomPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {
    "none": lambda kept: None,
    "random": lambda kept: RandomPress(1 - kept),
    "streaming_llm": lambda kept: StreamingLLMPress(1 - kept, n_sink=4),
    "snapkv": lambda kept: SnapKVPress(1 - kept, window_size=32, kernel_size=7),
    "keydiff": lambda kept: KeyDiffPress(1 - kept),
    "adakv(snapkv)": lambda kept: AdaKVPress(
        SnapKVPress(1 - kept, window_size=32, kernel_size=7), alpha_safeguard=0.0
    ),
    "kvzip": lambda kept: KVzipPress(1 - kept),
}


@torch.no_grad()
def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    context = torch.tensor([job["context"]])
    model.model(context[:, :256], past_key_values=DynamicCache())  # warm up
    press, cache = PRESSES[job["press"]](job["kept"]), DynamicCache()
    started = time.perf_counter()
    with press(model) if press is not None else contextlib.nullcontext():
        model.model(input_ids=context, past_key_values=cache)
    prefill = time.perf_counter() - started
    held = sum(layer.keys.numel() * layer.keys.element_size() * 2 for layer in cache.layers)
    answers, seconds, tokens = [], 0.0, 0
    for question in job["questions"]:
        started = time.perf_counter()
        ids = _answer(model, copy.deepcopy(cache), question, len(job["context"]), job)
        seconds += time.perf_counter() - started
        tokens += len(ids) + 1
        answers.append(ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    json.dump(
        {
            "prefill_seconds": prefill,
            "decode_seconds_per_token": seconds / tokens,
            "kv_bytes": held,
            "process_peak_bytes": peak,
            "answers": answers,
            "transformers": transformers.__version__,
        },
        sys.stdout,
    )


def _answer(
    model: Any, cache: DynamicCache, question: list[int], start: int, job: dict[str, Any]
) -> list[int]:
    """Greedy tokens up to the end of turn, at true positions behind the uncompressed context."""
    unread, position, said = question, start, []
    while len(said) < job["max_new_tokens"]:
        places = torch.arange(position, position + len(unread))[None]
        logits = model(
            torch.tensor([unread]),
            past_key_values=cache,
            position_ids=places,
            logits_to_keep=1,
        ).logits
        position += len(unread)
        token = int(logits[0, -1].argmax())
        if token in job["stops"]:
            break
        said.append(token)
        unread = [token]
    return said


if __name__ == "__main__":
    main()
