"""How a layer that parks is told apart in a saved state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.recall import OffloadSpec
from larder.core.spec import LayerSpec

SLOW, INDEX, PARKING, OBSERVED = "slow.", "index.", "parking", "observed"  # names in a state


def offload_spec_tensor(parking: OffloadSpec) -> Tensor:
    """Where entries go and how they are found again, as a tensor."""
    return torch.tensor(list(parking.told().encode()), dtype=torch.uint8)


def saved_offload_spec(state: Mapping[str, Tensor], layer: LayerSpec) -> OffloadSpec:
    """What `offload_spec_tensor` told of a layer.

    Raises:
        CacheError: another store was saved.
    """
    told = state.get(PARKING)
    if told is None:
        raise CacheError(
            f"Layer {layer.index} of the saved cache parked nothing, but its description says so: "
            "build the cache again."
        )
    return OffloadSpec.of(bytes(told.cpu().tolist()).decode())


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors whose names begin so, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
