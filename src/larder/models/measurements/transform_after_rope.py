"""Transforms of keys as they are cached, for `transform(rope="after")`: see `transform`."""

from __future__ import annotations

from larder.core.codec import RopeStage
from larder.models.measurements.transform import TransformMeasurement


class RotatedTransform(TransformMeasurement):
    """Keys and queries behind their rotary embedding."""

    file_name = "transform_after_rope.safetensors"
    rope = RopeStage.AFTER


Part = RotatedTransform
