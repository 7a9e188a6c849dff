"""Worker that gives the positions that presses of kvpress keep: JSON in, JSON out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from informed_presses import inform_press
from peer_worker import EAGER, build_cache, build_press, load_model, removed_share
from torch import Tensor

Positions = list[list[list[int]]]  # by layer and kv head, ascending


@torch.no_grad()
def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Positions that each press keeps, or why it could not run.

    Args:
        job: `model`, `dtype`, `threads`, `ids` of the context, `kept` entries of each head, and
            `presses`, constructor calls.
    """
    torch.set_num_threads(job["threads"])
    return [_result(job, made) for made in job["presses"]]


def _result(job: dict[str, Any], made: str) -> dict[str, Any]:
    started = time.perf_counter()
    head = {"made": made, "kvpress": version("kvpress")}
    try:
        positions = kept_positions(job, made)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return head | {"refused": f"{type(error).__name__}: {error}"}
    return head | {"kept": positions, "seconds": time.perf_counter() - started}


def kept_positions(job: dict[str, Any], made: str) -> Positions:
    """Positions of the context that a press keeps: what it left in the cache, without what it
    masks; of ThinKPress, the channels that it keeps.
    """
    ids, eager = job["ids"], "eager" if EAGER in made else "sdpa"
    model = load_model(job["model"], job["dtype"], eager, "cpu")
    behind = job["question"] if made.startswith("FinchPress") else []  # it keeps these as well
    removed = removed_share(job["kept"] + len(behind), len(ids) + len(behind))
    press = build_press(made, removed)
    inform_press(press, made, job)
    cache = build_cache("DynamicCache()", model.config)
    torch.manual_seed(job["seed"])
    delimiter = [press.delimiter_token_id] if behind else []
    attentions = [layer.self_attn for layer in model.model.layers]
    # The hooks of the recording come before the press's own.
    with _recorded(cache, attentions) as whole, press(model):
        read = torch.tensor([ids + delimiter + behind])
        model.model(input_ids=read, past_key_values=cache)
    left = [layer.keys[0] for layer in cache.layers]
    if made.startswith("ThinKPress"):
        return [[head.any(0).nonzero().flatten().tolist() for head in keys] for keys in left]
    return [
        _positions(whole[index][:, : len(ids)], _digests(left[index]), attention)
        for index, attention in enumerate(attentions)
    ]


@contextmanager
def _recorded(cache: Any, attentions: list[Any]) -> Iterator[dict[int, Tensor]]:
    """Digests of the keys of each layer, as soon as they are in the cache."""
    whole = dict[int, Tensor]()

    def record(module: Any, *_: Any) -> None:
        keys = cache.layers[module.layer_idx].keys
        if keys is not None:  # else the press reads texts of its own first
            whole.setdefault(module.layer_idx, _digests(keys[0]))

    hooks = [each.register_forward_hook(record) for each in attentions]
    try:
        yield whole
    finally:
        for hook in hooks:
            hook.remove()


def _digests(keys: Tensor) -> Tensor:
    """Number of each key's bits, [K, S]; a rotated key occurs once in its head."""
    bits = keys.float().contiguous().view(torch.int32).long()
    return (bits * (torch.arange(bits.shape[-1]) * 2654435761 + 1)).sum(-1)


def _positions(whole: Tensor, left: Tensor, attention: Any) -> list[list[int]]:
    masked = vars(attention).pop("masked_key_indices", None)
    kept = list[list[int]]()
    for head, (digests, remaining) in enumerate(zip(whole, left, strict=True)):
        positions = {int(digest): index for index, digest in enumerate(digests)}
        own = {positions[int(digest)] for digest in remaining if int(digest) in positions}
        if masked is not None:
            own -= set(masked[2][masked[1] == head].tolist())
        kept.append(sorted(own))
    return kept


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
