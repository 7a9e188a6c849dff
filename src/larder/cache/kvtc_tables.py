"""Principal components of keys and values over all layers of a model, kept by fingerprint.

    keys before rotation of all layers side by side  -  mean  ->  x basis  ->  components

One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that `larder train kvtc` writes.
Its bytes are counted apart from the caches that it codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.table_file import TrainedTables

SIDES = ("keys", "values")
STORED_DTYPE = torch.bfloat16  # of bases


@dataclass(frozen=True, eq=False)
class PrincipalSide:
    """Principal components of the keys or values of all layers.

    Args:
        basis: columns are directions, largest deviation first.
        plans: size and bits of each group of components, in order, by the share of the bytes.
    """

    mean: Float[Tensor, " W"]
    basis: Float[Tensor, "W R"]
    plans: Mapping[str, Int[Tensor, "G 2"]]


@dataclass(frozen=True, eq=False)
class KvtcTables(TrainedTables):
    """Components of a model's keys and values.

    Args:
        radians: RoPE frequencies of each layer.
    """

    sides: tuple[PrincipalSide, PrincipalSide]
    radians: tuple[Float[Tensor, " half"], ...]
    method: ClassVar[str] = "kvtc"
    content: ClassVar[str] = "principal components"

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name."""
        found = {f"radians.{place}": own.float().clone() for place, own in enumerate(self.radians)}
        for name, side in zip(SIDES, self.sides, strict=True):
            found |= {f"{name}.mean": side.mean, f"{name}.basis": side.basis.to(STORED_DTYPE)}
            found |= {f"{name}.plan.{share}": plan.int() for share, plan in side.plans.items()}
        return {name: tensor.contiguous() for name, tensor in sorted(found.items())}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> KvtcTables:
        count = sum(name.startswith("radians.") for name in tensors)
        keys, values = (_side(tensors, name) for name in SIDES)
        return cls((keys, values), tuple(tensors[f"radians.{n}"] for n in range(count)))


def _side(tensors: Mapping[str, Tensor], name: str) -> PrincipalSide:
    prefix = f"{name}.plan."
    plans = {key.removeprefix(prefix): own for key, own in tensors.items() if prefix in key}
    return PrincipalSide(tensors[f"{name}.mean"], tensors[f"{name}.basis"].float(), plans)
