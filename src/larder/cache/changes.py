"""What carrying out a plan writes into a storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class PlanWrites:
    """What a plan writes into the entries that stay, once they lie where they stay.

    Args:
        targets: rows of the storage that get `keys` and `values`.
        rows: those of all entries, which get `columns`; empty where nothing is written by row.
    """

    targets: Int64[Tensor, " N"]
    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N D"]
    rows: Int64[Tensor, " _"]
    columns: Mapping[str, Float[Tensor, " T"]]
    scalars: Mapping[str, Float[Tensor, " K"]]
