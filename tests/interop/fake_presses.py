"""Presses with the interface of kvpress 0.5.5, written for tests: the package is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class BasePress:
    """Hooks that change a cache behind each attention, while a prompt is read."""

    def post_init_from_model(self, model: Any) -> None:
        self.model = model

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward_hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer, states = kwargs["past_key_values"].layers[module.layer_idx], kwargs["hidden_states"]
        shown = module, states, layer.keys, layer.values, output[1], kwargs
        layer.keys, layer.values = self.compress(*shown)
        return output

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Context of calls of a model; transformers no longer tells layers what hooks read."""
        yield


@dataclass
class QueryPress(BasePress):
    """Attention of the last queries and norms of values, with the model's own projections."""

    compression_ratio: float = 0.0

    def score(
        self, module: Any, states: Tensor, keys: Tensor, values: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        width, kv_heads = module.head_dim, keys.shape[1]
        queries = module.q_proj(states[:, -4:]).view(1, 4, -1, width).transpose(1, 2)
        cos, sin = (each[:, -4:] for each in kwargs["position_embeddings"])
        first, second = queries.chunk(2, -1)
        turned = queries * cos + torch.cat([-second, first], -1) * sin
        grouped = turned.reshape(1, kv_heads, -1, width)
        return (grouped @ keys.mT / width**0.5).softmax(-1).mean(2) * values.norm(dim=-1)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        assert keys.shape[2] > 8, "the prompt is shorter than the window"
        kept = int(keys.shape[2] * (1 - self.compression_ratio))
        best = self.score(module, hidden_states, keys, values, kwargs).topk(kept, -1).indices
        positions = best[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, positions), values.gather(2, positions)


@dataclass
class KeyNormPress(QueryPress):
    """Norms of keys, smallest first."""

    def score(
        self, module: Any, states: Tensor, keys: Tensor, values: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        return -keys.norm(dim=-1)


@dataclass
class MaskingPress(BasePress):
    """Entries chosen over all heads together and marked in the module, as AdaKV does."""

    press: QueryPress

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.press.score(module, hidden_states, keys, values, kwargs)[0]
        removed = int(scores.numel() * self.press.compression_ratio)
        worst = (-scores.flatten()).topk(removed).indices
        heads, positions = worst // scores.shape[1], worst % scores.shape[1]
        module.masked_key_indices = (torch.zeros_like(heads), heads, positions)
        return keys, values


@dataclass
class ZeroingPress(BasePress):
    """Key channels set to zero in place, as ThinK does."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.mul_((torch.arange(keys.shape[3]) > 3).float()), values


@dataclass
class GeneratingPress(QueryPress):
    """A press with a hook of its own, as those that act while text is generated."""

    def forward_hook(self, module, args, kwargs, output):
        return output


def left_by(press: Any, model: Any, ids: Tensor) -> list[list[list[int]]]:
    """Positions of each layer and head that a press leaves when its own hook runs.

    Transformers no longer tells attention layers the `cache_position` that hooks of kvpress read.
    """
    whole, cache = cache_after(None, model, ids), cache_after(press, model, ids)
    found = []
    for before, after, layer in zip(whole.layers, cache.layers, model.model.layers, strict=True):
        marked = vars(layer.self_attn).pop("masked_key_indices", None)
        heads = []
        for head, (keys, left) in enumerate(zip(before.keys[0], after.keys[0], strict=True)):
            positions = torch.cdist(left, keys).argmin(1).tolist()
            gone = set() if marked is None else set(marked[2][marked[1] == head].tolist())
            heads.append(sorted(set(positions) - gone))
        found.append(heads)
    return found


@torch.no_grad()
def cache_after(press: Any, model: Any, ids: Tensor) -> Any:
    """Cache of transformers behind a prompt, under a press or none."""
    from transformers import DynamicCache

    def hook(module: nn.Module, args: Any, named: dict[str, Any], out: Any) -> Any:
        return press.forward_hook(
            module, args, {**named, "cache_position": torch.arange(ids.shape[1])}, out
        )

    cache, hooks = DynamicCache(), []
    if press is not None:
        press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    model.model(input_ids=ids, past_key_values=cache)
    for each in hooks:
        each.remove()
    return cache
