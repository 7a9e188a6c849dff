"""Transforms of keys and values without a metric, for `transform(metric=0)`: see `transform`."""

from __future__ import annotations

from larder.models.measurements.transform import TransformMeasurement


class UnweightedTransform(TransformMeasurement):
    """Eigenvectors of plain covariances."""

    file_name = "transform_unweighted.safetensors"
    metric = 0.0


Part = UnweightedTransform
