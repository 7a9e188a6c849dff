"""Convolution over the entries of kv heads whose outputs are weights of entries in slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor


def slot_weights(
    keys: Float[Tensor, "K N D"],
    values: Float[Tensor, "K N D"],
    chosen: Int64[Tensor, "K S"],
    kernel: Float[Tensor, "most E taps"],
    bias: Float[Tensor, " most"],
    gamma: Float[Tensor, ""],
) -> Float[Tensor, "K S N"]:
    """Weight of every entry in each slot: gamma of a softmax over entries, the rest of one of them.

    Args:
        keys, values: neighbors by order; the convolution reads both side by side.
        chosen: entry that each slot was, ascending.
        kernel, bias: a channel for each slot, of which the first are used.
    """
    count = chosen.shape[1]
    inputs = torch.cat([keys, values], 2).transpose(1, 2).to(kernel.dtype)  # [K, E, N]
    shares = F.conv1d(inputs, kernel[:count], bias[:count], padding="same").softmax(-1)
    own = F.one_hot(chosen, keys.shape[1]).to(shares.dtype)
    return own + gamma * (shares - own)
