"""How a layer that parks is told apart in a saved state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.recall import Parking
from larder.core.spec import LayerSpec

SLOW, INDEX, PARKING, OBSERVED = "slow.", "index.", "parking", "observed"  # names in a state


def bytes_of(parking: Parking) -> Tensor:
    """Where entries go and how they are found again, as a tensor."""
    return torch.tensor(list(parking.told().encode()), dtype=torch.uint8)


def saved_parking(state: Mapping[str, Tensor], layer: LayerSpec) -> Parking:
    """What `bytes_of` told of a layer.

    Raises:
        CacheError: another store was saved.
    """
    told = state.get(PARKING)
    if told is None:
        raise CacheError(
            f"Layer {layer.index} of the saved cache parked nothing, but its description says so: "
            "build the cache again."
        )
    return Parking.of(bytes(told.cpu().tolist()).decode())


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors whose names begin so, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
