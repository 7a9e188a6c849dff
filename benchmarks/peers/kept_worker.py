"""Worker that gives the positions that presses of kvpress keep: JSON in, JSON out."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
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
    """Positions that a press keeps: what it left in the cache, without what it masks."""
    ids, eager = job["ids"], "eager" if EAGER in made else "sdpa"
    model = load_model(job["model"], job["dtype"], eager, "cpu")
    press = build_press(made, removed_share(job["kept"], len(ids)))
    _give_weights(press, made, job)
    cache, whole = build_cache("DynamicCache()", model.config), dict[int, Tensor]()

    def record(module: Any, *_: Any) -> None:
        whole.setdefault(module.layer_idx, _digests(cache.layers[module.layer_idx].keys[0]))

    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [each.register_forward_hook(record) for each in attentions]  # before the press's own
    torch.manual_seed(job["seed"])
    try:
        with press(model):
            model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        _positions(whole[index], _digests(cache.layers[index].keys[0]), attention)
        for index, attention in enumerate(attentions)
    ]


def _give_weights(press: Any, made: str, job: dict[str, Any]) -> None:
    """Give a press whose weights come from a hub those of the job in their place."""
    if made.startswith("QFilterPress"):
        # The press keeps the least products with its filter, the policy the largest.
        press.q_filters = -torch.tensor(job["q_filters"])
    elif made.startswith("KVzapPress"):
        from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel  # pyright: ignore
        from safetensors.torch import load_file

        weights = load_file(job["kvzap"])
        heads, width = weights["layers.0.weight"].shape
        config = KVzapConfig(input_dim=width, output_dim=heads, n_modules=len(weights) // 2)
        press.kvzap_model = KVzapModel(config)
        press.kvzap_model.load_state_dict({name: one.float() for name, one in weights.items()})
    else:
        return
    press.post_init_from_model = lambda model: None


def _digests(keys: Tensor) -> Tensor:
    """Number of each key's bits, [K, S]; a rotated key occurs once in its head."""
    bits = keys.float().contiguous().view(torch.int32).long()
    return (bits * (torch.arange(bits.shape[-1]) * 2654435761 + 1)).sum(-1)


def _positions(whole: Tensor, left: Tensor, attention: Any) -> list[list[int]]:
    masked = vars(attention).pop("masked_key_indices", None)
    kept = list[list[int]]()
    for head, (digests, remaining) in enumerate(zip(whole, left, strict=True)):
        places = {int(digest): place for place, digest in enumerate(digests)}
        own = {places[int(digest)] for digest in remaining}
        if masked is not None:
            own -= set(masked[2][masked[1] == head].tolist())
        kept.append(sorted(own))
    return kept


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
