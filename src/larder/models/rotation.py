"""How a layer turns its queries and keys by their positions: measured, and so never believed.

A few tokens are each read at several positions, with attention that answers zeros: what enters a
layer depends on the token alone, and the keys of a token differ by their rotation and nothing else.
Frequencies that the model holds are tried until one explains the keys. That settles at once which
layers are turned, by which base, in how many dimensions, and that dimensions are paired as
`ops.rope` pairs them. An attention scaling that a model multiplies into queries and keys stays
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import Keys, Queries, Values
from larder.ops.rope import rotate

ROPE_BUFFER = "inv_freq"  # how transformers names what a rotation holds
ROTATION_TOKENS, ROTATION_POSITIONS = (
    4,
    8,
)  # several tokens, because that of padding may be all zeros


class KeyProbe:
    """Stands in for a pass, answers zeros, and notes the keys of each layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Keys] = {}

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del values, scaling, sliding_window
        self.keys[layer] = keys
        return torch.zeros_like(queries)


@torch.no_grad()
def measure_rotation(model: Any, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The layers of a model without its head, told how they turn."""
    table, seen = model.get_input_embeddings().weight, KeyProbe()
    tokens = (
        torch.arange(1, ROTATION_TOKENS + 1, device=table.device)
        * table.shape[0]
        // (ROTATION_TOKENS + 1)
    )
    places = torch.arange(ROTATION_POSITIONS, device=table.device)
    model(
        input_ids=tokens.repeat_interleave(ROTATION_POSITIONS)[None],
        position_ids=places.repeat(ROTATION_TOKENS)[None],
        use_cache=False,
        larder=seen,
    )
    known = [buffer for name, buffer in model.named_buffers() if name.endswith(ROPE_BUFFER)]
    return tuple(
        replace(layer, radians=_best_frequencies(seen.keys[layer.index], places, known))
        for layer in layers
    )


def _best_frequencies(
    keys: Keys, places: Int[Tensor, " P"], known: Sequence[Float[Tensor, " _"]]
) -> tuple[float, ...] | None:
    """The frequencies that turn a token's first key into its others best, if any does so well."""
    same = (
        keys.float().unflatten(1, (ROTATION_TOKENS, ROTATION_POSITIONS)).flatten(0, 1)
    )  # [K * tokens, P, D]
    still = torch.empty(0, device=keys.device)
    fitting = [radians.float() for radians in known if 2 * len(radians) <= keys.shape[2]]
    tried = [(_rotation_error(same, places, radians), radians) for radians in [still, *fitting]]
    error, best = min(tried, key=lambda pair: pair[0])
    return tuple(best.tolist()) if error < torch.finfo(keys.dtype).eps ** 0.5 else None


def _rotation_error(
    keys: Float[Tensor, "N P D"], places: Int[Tensor, " P"], radians: Float[Tensor, " half"]
) -> float:
    """Largest distance from a key to its token's first one turned, by the longest key."""
    turned = rotate(keys[:, :1].expand_as(keys), places, radians)
    longest = keys.norm(dim=-1).max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((turned - keys).norm(dim=-1).max() / longest)
