"""Capture of the attention inputs of each managed layer during one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from larder.core.types import Keys, Queries, Values
from larder.models.decoder import Decoder
from larder.ops.attention import causal_attention

CHUNK_TOKENS = 128  # queries whose weights are in memory at a time
TINY = 1e-30  # for outputs that are all zeros


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values of one managed layer; row t of each belongs to token t."""

    queries: Queries
    keys: Keys
    values: Values
    scaling: float

    def weights(self, rows: Int[Tensor, " Q"]) -> Float[Tensor, "H Q S"]:
        """Softmax weights of the queries `rows` over all tokens up to the last of them."""
        seen = int(rows.max()) + 1
        groups = self.queries[:, rows].float().unflatten(0, (self.keys.shape[0], -1))
        keys = self.keys[:, None, :seen].float()
        logits = groups @ keys.transpose(-1, -2) * self.scaling  # [K, R, Q, S]
        later = torch.arange(seen, device=rows.device) > rows[:, None]
        return logits.masked_fill(later, -torch.inf).softmax(-1).flatten(0, 1)

    def squared_errors(
        self, rows: Int[Tensor, " Q"], seen: Bool[Tensor, "Q S"]
    ) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Squared change of the outputs of some tokens under a mask, and squared outputs.

        Returns:
            For each kv head both sums of squares.
        """
        weights = self.weights(rows)
        marked = weights * seen[:, : weights.shape[2]]
        marked = marked / marked.sum(-1, keepdim=True)
        values = self.values[:, None, : weights.shape[2]].float()
        groups = (len(values), -1)
        whole = weights.unflatten(0, groups) @ values  # [K, R, Q, D]
        change = marked.unflatten(0, groups) @ values - whole
        return change.double().square().sum((1, 2, 3)), whole.double().square().sum((1, 2, 3))


class AttentionCapture:
    """Plain causal attention that passes the inputs of managed layers to a callback."""

    def __init__(self, decoder: Decoder, show: Callable[[int, AttentionInputs], None]) -> None:
        self._managed = {layer.index for layer in decoder.spec.managed}
        self._show = show

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        if layer in self._managed:
            self._show(layer, AttentionInputs(queries, keys, values, scaling))
        text = (queries.shape[1],)
        out, _ = causal_attention(queries, keys, values, scaling, text, sliding_window)
        return out.to(queries.dtype)


@torch.no_grad()
def capture_attention(
    decoder: Decoder, ids: tuple[int, ...], show: Callable[[int, AttentionInputs], None]
) -> None:
    """Forward a text, and call `show` with each managed layer's index and inputs."""
    device = decoder.spec.device
    decoder.body(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.arange(len(ids), device=device)[None],
        use_cache=False,
        larder=AttentionCapture(decoder, show),
    )


def flatten_layers(decoder: Decoder, numbers: dict[int, list[float]]) -> tuple[float, ...]:
    """Numbers of all managed layers, in layer order."""
    return tuple(value for layer in decoder.spec.managed for value in numbers[layer.index])
