"""Calibrated transforms of a model's keys and values, kept by fingerprint.

    keys before rotation, values [K, D]  -  mean  ->  x forward  ->  components [K, D]

One file of tensors per model and calibration, under `$LARDER_HOME/<fingerprint>/` or in the
package, that `larder.models.measurements.transform` and its siblings write. Caches share
what is read from it. Their own bytes do not include it: `TransformTables.nbytes` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from larder.cache.table_file import check_measured, measured_path, read_tensors, tensors_digest
from larder.core.codec import Coder, RopeStage, TransformSpec
from larder.core.errors import CacheError
from larder.core.spec import LayerSpec
from larder.ops.cpu.transform_attention import ByteMatrices, bfloat16_pairs, byte_matrices
from larder.ops.plane_coder import MOST_WIDTH
from larder.ops.rope import rotate, rotate_by_table
from larder.ops.symbol_model import classes_of, mean_bits

PARTS = ("forward", "mean", "deviation")
KEYS, VALUES = 0, 1
NO_LEVELS = torch.zeros(2, 0)
STEP_OCTAVES, STEP_PRECISION = 20.0, 1e-4  # of the search for a step, in octaves


@dataclass(frozen=True, eq=False)
class TransformTables:
    """Transforms of the keys (0) and values (1) of one layer, per kv head.

    Args:
        forward: columns are the directions of the components, largest deviation first.
        mean: of keys before rotation, and of values.
        deviation: of each component on the calibration text.
        radians: RoPE frequencies of the layer; zeros where rotated keys are transformed.
        levels: of the components of keys and of values, where a coder has levels.
    """

    forward: Float[Tensor, "2 K D D"]
    mean: Float[Tensor, "2 K D"]
    deviation: Float[Tensor, "2 K D"]
    radians: tuple[float, ...]
    levels: Float[Tensor, "2 M"] = NO_LEVELS

    def scaled(self, factors: Float[Tensor, "2 K"]) -> TransformTables:
        """Tables whose components are multiplied by a factor for each side and head."""
        scale = factors[..., None]
        return replace(
            self, forward=self.forward * scale[..., None], deviation=self.deviation * scale
        )

    @cached_property
    def inverse(self) -> Float[Tensor, "2 K D D"]:
        """Matrices that turn components back."""
        # torch 2.13's LU of a batch of matrices above 128 fails on several threads of MKL
        return torch.from_numpy(np.linalg.inv(self.forward.double().cpu().numpy())).float()

    @cached_property
    def bfloat16_keys(self) -> Int32[Tensor, "K half D"]:
        """Matrices that turn components of keys back, as pairs of bfloat16."""
        return bfloat16_pairs(self.inverse[KEYS])

    @cached_property
    def byte_keys(self) -> ByteMatrices:
        """Matrices that turn components of keys back, as bytes."""
        return byte_matrices(self.inverse[KEYS])

    @cached_property
    def digest(self) -> str:
        """Short digest of the numbers, which identifies a calibration."""
        tables = (self.forward, self.mean, self.deviation)
        return tensors_digest((*tables, self.levels) if self.levels.numel() else tables)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, shared by all caches of a model."""
        return sum(part.nbytes for part in (self.forward, self.mean, self.deviation, self.levels))

    def components(
        self,
        head: int,
        keys: Float[Tensor, "N D"],
        values: Float[Tensor, "N D"],
        positions: Int[Tensor, " N"],
    ) -> Float[Tensor, "N D2"]:
        """Components of the entries of a head: those of keys, then those of values."""
        plain = rotate(keys.float()[None], -positions, self._frequencies)[0]
        sides = ((KEYS, plain), (VALUES, values.float()))
        parts = [(x - self.mean[side, head]) @ self.forward[side, head] for side, x in sides]
        return torch.cat(parts, 1)

    def keys(
        self, head: int, components: Float[Tensor, "N D"], positions: Int[Tensor, " N"]
    ) -> Float[Tensor, "N D"]:
        """Rotated keys of components, in float32."""
        plain = components @ self.inverse[KEYS, head] + self.mean[KEYS, head]
        return rotate_by_table(plain[None], positions, self.radians)[0]

    def values(self, head: int, components: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Values of components, or averages of values of averages of components, in float32."""
        return components @ self.inverse[VALUES, head] + self.mean[VALUES, head]

    @cached_property
    def _frequencies(self) -> Float[Tensor, " half"]:
        return torch.tensor(self.radians, dtype=torch.float32)

    @staticmethod
    def load(layer: LayerSpec, spec: TransformSpec) -> TransformTables:
        """Tables of a layer of the calibrated model of a spec; caches of a model share them.

        Raises:
            CacheError: the model is not calibrated, its rotary embedding is unknown, or its heads
                have more components than the coder holds.
        """
        if spec.coder is Coder.PLANES and 2 * layer.head_dim > MOST_WIDTH:
            raise CacheError(
                f"Layer {layer.index} has heads of {layer.head_dim} components, but "
                f"transform(coder='planes') holds {MOST_WIDTH // 2} at most: take another coder."
            )
        if layer.radians is None:
            raise CacheError(
                f"Layer {layer.index} has a rotary embedding unknown to Larder, so its keys "
                "cannot be unrotated: use a storage other than transform() and kvquant()."
            )
        path = measured_path(spec.model, spec.calibration)
        is_unrotated = spec.rope is RopeStage.BEFORE
        radians = layer.radians if is_unrotated else (0.0,) * len(layer.radians)
        try:
            return _read(path, path.stat().st_mtime_ns, layer.index, radians, spec.level_bits)
        except (OSError, KeyError):
            raise CacheError(
                f"{path} has no whole transforms of layer {layer.index}: measure them with "
                f"`larder model calibrate MODEL {spec.calibration} --again`, on the device and "
                "dtype that it runs in, under its adapter if it has one."
            ) from None


@cache
def _read(
    path: Path, modified: int, layer: int, radians: tuple[float, ...], bits: int
) -> TransformTables:
    """Tables of one layer from a file as it was at a time.

    Args:
        bits: of the code of a level; 0 without levels.

    Raises:
        KeyError: the file is damaged, or has no such layer.
    """
    check_measured(path)
    names = [*PARTS, levels_name(bits)] if bits else PARTS
    forward, mean, deviation, *levels = read_tensors(
        path, [f"{layer}.{part}" for part in names]
    ).values()
    if not all(bool(torch.isfinite(part).all()) for part in (forward, mean, deviation)):
        raise KeyError(f"layer {layer} has numbers that are not finite")
    return TransformTables(forward.float(), mean, deviation, radians, *levels)  # packed as halves


def calibrated_step(spec: TransformSpec) -> float:
    """Step with which the components of the calibration text take the bits of a spec.

    Args:
        spec: of a calibrated model, whose tables `TransformTables.load` finds.
    """
    path = measured_path(spec.model, spec.calibration)
    return _step(path, path.stat().st_mtime_ns, spec.coder, spec.bits)


@cache
def _step(path: Path, modified: int, coder: Coder, bits: float) -> float:
    """`calibrated_step` by a file as it was at a time: bits fall as the step grows."""
    held = read_tensors(path)
    parts = [tensor.flatten() for name, tensor in held.items() if name.endswith(".deviation")]
    deviations, means = torch.cat(parts).double().numpy(), mean_bits(coder)
    low, high = -STEP_OCTAVES, STEP_OCTAVES
    while high - low > STEP_PRECISION:
        tried = (low + high) / 2
        is_over = float(means[classes_of(deviations, 2.0**tried)].mean()) > bits
        low, high = (tried, high) if is_over else (low, tried)
    return 2.0**high


def levels_name(bits: int) -> str:
    """Name of the levels with codes of some bits, among the tensors of a layer."""
    return f"levels{bits}"


def state_of(tables: Mapping[int, TransformTables]) -> dict[str, Tensor]:
    """Tensors of a file, by name."""
    return {
        f"{index}.{part}": tensor.contiguous()
        for index, table in tables.items()
        for part, tensor in zip(PARTS, (table.forward, table.mean, table.deviation), strict=True)
    }
