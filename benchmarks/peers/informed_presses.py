"""Weights and questions for presses of kvpress that load them from a hub or ask their user.

Each press gets what Larder's policy has: the same directions, gates, scores of heads or curves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SAMPLES = 8  # texts by which DuoAttentionPress scores heads on the fly; 50 by its default


def inform_press(press: Any, made: str, job: dict[str, Any]) -> None:
    """Give a press what it needs beyond the text.

    Args:
        made: its constructor call.
        job: `q_filters`, `kvzap`, `fast_kvzip`, `streaming_error`, `books`, `curve` or `question`,
            as far as the presses of the job need them.
    """
    give = GIVERS.get(made.partition("(")[0])
    if give is not None:
        give(press, job)


def _give_q_filters(press: Any, job: dict[str, Any]) -> None:
    # The press keeps the least products with its filter, the policy the largest.
    press.q_filters = -torch.tensor(job["q_filters"])
    press.post_init_from_model = lambda model: None


def _give_kvzap(press: Any, job: dict[str, Any]) -> None:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel  # pyright: ignore
    from safetensors.torch import load_file

    weights = load_file(job["kvzap"])
    heads, width = weights["layers.0.weight"].shape
    config = KVzapConfig(input_dim=width, output_dim=heads, n_modules=len(weights) // 2)
    press.kvzap_model = KVzapModel(config)
    press.kvzap_model.load_state_dict({name: one.float() for name, one in weights.items()})
    press.post_init_from_model = lambda model: None


def _give_gates(press: Any, job: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(job["fast_kvzip"])
    layers = {int(name.split(".")[1]) for name in tensors}
    press.gates = [fast_kvzip_gate(tensors, layer) for layer in sorted(layers)]


def fast_kvzip_gate(tensors: dict[str, torch.Tensor], layer: int) -> Any:
    """Gate of kvpress with one layer's tensors of a file of learned weights."""
    from kvpress.presses.fastkvzip_press import FastKVzipGate  # pyright: ignore

    start = f"layers.{layer}."
    own = {
        name[len(start) :]: one.float() for name, one in tensors.items() if name.startswith(start)
    }
    heads, _, sinks, channels = own["k_base"].shape
    group, width = own["b"].shape[-1], own["k_proj.weight"].shape[1]
    gate = FastKVzipGate(layer, width, heads, group, torch.float32, channels, sinks)
    gate.load_state_dict(own)
    return gate


def _give_heads(press: Any, job: dict[str, Any]) -> None:
    if press.on_the_fly_scoring:
        _give_books(job["books"])
        return
    scores = np.array(job["streaming_error"]["scores"])
    ends = job["streaming_error"]["sinks"], job["streaming_error"]["recent"]
    press.load_attention_pattern = lambda model: (*ends, scores)


def _give_books(texts: list[str]) -> None:
    """Replace the data set that heads are scored by, and take fewer texts of it."""
    import kvpress.presses.duo_attention_press as module  # pyright: ignore
    import pandas  # pyright: ignore

    table = pandas.DataFrame({"chapter": texts})
    module.load_dataset = lambda *_, **__: SimpleNamespace(to_pandas=lambda: table)
    if not isinstance(module.duo_attention_on_the_fly, partial):
        score = partial(module.duo_attention_on_the_fly, num_samples=SAMPLES)
        module.duo_attention_on_the_fly = score


def _give_curve(press: Any, job: dict[str, Any]) -> None:
    # The press has a row for each percent; all are the one of this budget.
    press._budget_curves = np.tile(np.array(job["curve"]), (99, 1, 1))


def _give_delimiter(press: Any, job: dict[str, Any]) -> None:
    """Name a token that neither context nor question has; its embedding is taken out again."""
    taken = {*job["ids"], *job["question"]}
    press.delimiter_token_id = next(
        number for number in range(len(taken) + 1) if number not in taken
    )


GIVERS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "QFilterPress": _give_q_filters,
    "KVzapPress": _give_kvzap,
    "FastKVzipPress": _give_gates,
    "DuoAttentionPress": _give_heads,
    "LUKVPress": _give_curve,
    "FinchPress": _give_delimiter,
}
