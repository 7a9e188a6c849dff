"""Principal components of keys and values over all layers of a model, kept by fingerprint.

    keys before rotation of all layers side by side  -  mean  ->  x basis  ->  components

One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that `larder train kvtc` writes.
Its bytes are counted apart from the caches that it codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.table_file import TrainedTables
from larder.core.errors import CacheError
from larder.core.home import home

KVTC_FILE = "kvtc.safetensors"
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

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name."""
        found = {f"radians.{place}": own.float().clone() for place, own in enumerate(self.radians)}
        for name, side in zip(SIDES, self.sides, strict=True):
            found |= {f"{name}.mean": side.mean, f"{name}.basis": side.basis.to(STORED_DTYPE)}
            found |= {f"{name}.plan.{share}": plan.int() for share, plan in side.plans.items()}
        return {name: tensor.contiguous() for name, tensor in sorted(found.items())}

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> KvtcTables:
        """Tables of a file's tensors.

        Raises:
            KeyError: one is missing.
        """
        count = sum(name.startswith("radians.") for name in tensors)
        keys, values = (_side(tensors, name) for name in SIDES)
        return KvtcTables((keys, values), tuple(tensors[f"radians.{n}"] for n in range(count)))

    @staticmethod
    def load(fingerprint: str) -> KvtcTables:
        """Tables of a model, shared by all caches of it.

        Raises:
            CacheError: there are none, or they cannot be read.
        """
        path = kvtc_path(fingerprint)
        try:
            return _read(path, path.stat().st_mtime_ns)
        except (OSError, KeyError):
            raise CacheError(
                f"{path} has no principal components for this model: make them with "
                "`larder train kvtc`, or choose another codec."
            ) from None


def kvtc_path(fingerprint: str) -> Path:
    """File of the components of a model."""
    return home() / fingerprint / KVTC_FILE


def _side(tensors: Mapping[str, Tensor], name: str) -> PrincipalSide:
    prefix = f"{name}.plan."
    plans = {key.removeprefix(prefix): own for key, own in tensors.items() if prefix in key}
    return PrincipalSide(tensors[f"{name}.mean"], tensors[f"{name}.basis"].float(), plans)


@cache
def _read(path: Path, modified: int) -> KvtcTables:
    """Tables of a file as it was at a time.

    Raises:
        KeyError: the file is damaged.
    """
    del modified
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise KeyError(str(error)) from None
    return KvtcTables.of(tensors)
