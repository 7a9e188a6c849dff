"""Worker that runs NVIDIA/kvpress, or a cache of transformers, on one job: JSON in, JSON out.

It is started by side_by_side.py in the peers' own environment and needs torch, transformers and the
job's packages, nothing of Larder. The context is read in one pass, as kvpress requires; questions
are at their true positions, each on a copy of the cache.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from _memory import PeakMemory, held_bytes, masked_entries

WARM_TOKENS = 256
PACKAGES = ("torch", "transformers", "kvpress", "optimum-quanto", "hqq")
EAGER = "ObservedAttentionPress"  # needs the whole attention matrix
# What they keep is an argument: a share of heads or channels, or a threshold.
OWN_SHARE = ("DuoAttentionPress", "ThinKPress", "SimLayerKVPress", "DMSPress")


def build_press(made: str, removed: float) -> Any:
    """Press of a job's constructor call.

    Args:
        removed: share of entries that it drops or masks.
    """
    import kvpress

    press = eval(made, dict(vars(kvpress)))  # of _pairs.py
    if not made.startswith(OWN_SHARE):
        press.compression_ratio = removed
    return press


def build_cache(made: str, config: Any) -> Any:
    """Cache of transformers from a job's constructor call."""
    from transformers import DynamicCache, QuantizedCache

    known = {kind.__name__: partial(kind, config=config) for kind in (DynamicCache, QuantizedCache)}
    return eval(made, known)  # of _pairs.py


def removed_share(kept: int, length: int) -> float:
    """Share to remove with which a press, which rounds down, keeps exactly `kept` entries."""
    share = 1 - kept / length
    while int(length * (1 - share)) < kept:
        share = math.nextafter(share, 0)
    return share


@lru_cache(maxsize=1)
def load_model(folder: str, dtype: str, attention: str, device: str) -> Any:
    """Model of a folder, loaded once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    return model.eval().to(device)


class Peer:
    """Model with a press or a cache."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.device, self.made = job, job["device"], job["made"]
        attention = "eager" if EAGER in self.made else "sdpa"
        self.model = load_model(job["model"], job["dtype"], attention, self.device)
        self.is_press = "Press(" in self.made

    def press(self, length: int) -> Any:
        """Context manager in which a context of that length is read."""
        if not self.is_press:
            return contextlib.nullcontext()
        removed = removed_share(round(self.job["kept"] * length), length)
        return build_press(self.made, removed)(self.model)

    def read(self, ids: list[int], watch: Callable[[Any], None] | None = None) -> Any:
        """Cache of a context.

        Args:
            watch: called with the cache after each layer, before a press has compressed it.
        """
        cache = build_cache("DynamicCache()" if self.is_press else self.made, self.model.config)
        hook = (lambda *_: None) if watch is None else (lambda *_: watch(cache))
        layers = self.model.model.layers if watch is not None else ()
        handles = [layer.self_attn.register_forward_hook(hook) for layer in layers]
        try:
            with self.press(len(ids)):
                self.model.model(input_ids=self.tensor(ids), past_key_values=cache)
        finally:
            for handle in handles:
                handle.remove()
        return cache

    def held(self, cache: Any) -> int:
        """Bytes of the cache, and of the indices of masked entries."""
        return held_bytes(cache, masked_entries(self.model)[1])

    def tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.device)

    def answer(self, cache: Any, question: list[int], start: int) -> tuple[list[int], list[float]]:
        """Greedy tokens up to the end of turn, and their times, both without the token that ends
        the turn.
        """
        unread, position, tokens, stamps = question, start, list[int](), [time.perf_counter()]
        while len(tokens) < self.job["max_new_tokens"]:
            stop = position + len(unread)
            positions = torch.arange(position, stop, device=self.device)[None]
            output = self.model(
                self.tensor(unread), past_key_values=cache, position_ids=positions, logits_to_keep=1
            )
            token = int(output.logits[0, -1].argmax())
            if token in self.job["stops"]:
                break
            stamps.append(time.perf_counter())
            tokens.append(token)
            position, unread = stop, [token]
        return tokens, stamps


def fork(cache: Any) -> Any:
    """Copy of a cache: caches of transformers grow by new tensors, never in place."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


@torch.no_grad()
def run(job: dict[str, Any]) -> dict[str, Any]:
    """Result of a job."""
    torch.set_num_threads(job["threads"])
    peer, context, highest = Peer(job), job["context"], [0]

    def watch(cache: Any) -> None:
        highest[0] = max(highest[0], peer.held(cache))

    peer.read(context[:WARM_TOKENS])  # imports its package, which is not part of the cache's memory
    peak, seconds, cpu_seconds = PeakMemory(job["device"]), list[float](), list[float]()
    if job["has_warm_up"]:
        peer.answer(peer.read(context, watch), job["questions"][0], len(context))
    for _ in range(job["repeats"]):
        cache = None  # free the previous one
        started, cpu_started = time.perf_counter(), time.process_time()
        cache = peer.read(context, None if job["has_warm_up"] else watch)
        peer.tensor([0]).cpu()  # synchronizes the accelerator
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    held, masked = peer.held(cache), masked_entries(peer.model)[0]
    answers = list[list[int]]()
    stamps = list[list[float]]()
    for question in job["questions"]:
        twin = fork(cache)
        answer, times = peer.answer(twin, question, len(context))
        answers.append(answer)
        stamps.append(times)
        highest[0] = max(highest[0], peer.held(twin))
    return peak.figures() | {
        "prefill_seconds": statistics.median(seconds),
        "prefill_cpu_seconds": statistics.median(cpu_seconds),
        "kv_bytes": held,
        "peak_kv_bytes": max(highest[0], held),
        "masked_entries": masked,
        "answers": answers,
        "stamps": stamps,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    json.dump([run(job) for job in json.load(sys.stdin)], sys.stdout)
