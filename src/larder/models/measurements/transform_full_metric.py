"""Transforms of keys and values by the full metric, for `transform(metric=1)`: see `transform`."""

from __future__ import annotations

from larder.models.measurements.transform import TransformMeasurement


class FullMetricTransform(TransformMeasurement):
    """Vectors weighed by the square root of the metric."""

    file_name = "transform_full_metric.safetensors"
    metric = 1.0


Part = FullMetricTransform
