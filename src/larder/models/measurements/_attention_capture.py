"""Numbers of the attention of each managed layer, measured in one forward without a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from larder.core.types import TokenIds
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.ops.attention import cap_logits
from larder.ops.attention_weights import softmax_with_sinks

CHUNK_TOKENS = 128  # queries whose weights are in memory at a time
TINY = 1e-30  # for outputs that are all zeros


def softmax_weights(inputs: AttentionInputs, rows: Int[Tensor, " Q"]) -> Float[Tensor, "H Q S"]:
    """Softmax weights of the queries `rows` over all tokens up to the last of them."""
    seen = int(rows.max()) + 1
    groups = inputs.queries[:, rows].float().unflatten(0, (inputs.keys.shape[0], -1))
    keys = inputs.keys[:, None, :seen].float()
    logits = cap_logits(groups @ keys.transpose(-1, -2) * inputs.scaling, inputs.softcap)
    later = torch.arange(seen, device=rows.device) > rows[:, None]
    visible = logits.masked_fill(later, -torch.inf).flatten(0, 1)  # [H, Q, S]
    return softmax_with_sinks(visible, inputs.sinks)


def squared_errors(
    inputs: AttentionInputs, rows: Int[Tensor, " Q"], seen: Bool[Tensor, "Q S"]
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Squared change of the outputs of some tokens under a mask, and squared outputs.

    Returns:
        For each kv head both sums of squares.
    """
    weights = softmax_weights(inputs, rows)
    marked = weights * seen[:, : weights.shape[2]]
    kept = marked.sum(-1, keepdim=True)
    if len(inputs.sinks):
        kept = kept + 1 - weights.sum(-1, keepdim=True)
    marked = marked / kept
    values = inputs.values[:, None, : weights.shape[2]].float()
    groups = (len(values), -1)
    whole = weights.unflatten(0, groups) @ values  # [K, R, Q, D]
    change = marked.unflatten(0, groups) @ values - whole
    return change.double().square().sum((1, 2, 3)), whole.double().square().sum((1, 2, 3))


def head_maxima(numbers: Float[Tensor, " H"], inputs: AttentionInputs) -> list[float]:
    """Maximum over the query heads of each kv head."""
    return numbers.unflatten(0, (inputs.keys.shape[0], -1)).amax(1).tolist()


def measure_layers(
    decoder: Decoder, ids: TokenIds, measure: Callable[[AttentionInputs], list[float]]
) -> tuple[float, ...]:
    """Numbers of all managed layers for a text, in layer order.

    Args:
        measure: numbers of one layer.
    """
    managed = {layer.index for layer in decoder.spec.managed}
    numbers: dict[int, list[float]] = {}

    def show(inputs: AttentionInputs) -> None:
        if inputs.layer in managed:
            numbers[inputs.layer] = measure(inputs)

    decoder.forward_uncached(ids, CausalAttention(show))
    return flatten_layers(decoder, numbers)


def flatten_layers(decoder: Decoder, numbers: dict[int, list[float]]) -> tuple[float, ...]:
    """Numbers of all managed layers, in layer order."""
    return tuple(value for layer in decoder.spec.managed for value in numbers[layer.index])


def copy_maxima(inputs: AttentionInputs, tokens: int) -> Float[Tensor, "K S"]:
    """Highest weight of a token of a copy on each of the first `tokens` tokens, by kv head.

    The copy is the last `tokens` tokens; weights are shares of the attention to the first ones.
    """
    device, total = inputs.queries.device, inputs.queries.shape[1]
    best = torch.zeros(inputs.keys.shape[0], tokens, device=device)
    for rows in torch.arange(total - tokens, total, device=device).split(CHUNK_TOKENS):
        groups = inputs.queries[:, rows].float().unflatten(0, (inputs.keys.shape[0], -1))
        keys = inputs.keys[:, None, :tokens].float()
        logits = cap_logits(groups @ keys.transpose(-1, -2) * inputs.scaling, inputs.softcap)
        best = torch.maximum(best, logits.softmax(-1).amax((1, 2)))
    return best
