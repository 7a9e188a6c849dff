"""Transforms of keys as they are cached, for `transform(rope="after")`: see `transform`."""

from __future__ import annotations

from larder.cache.transform_tables import tables_file
from larder.core.codec import RopeStage
from larder.models.measurements.transform import TransformMeasurement


class RotatedTransform(TransformMeasurement):
    """Keys and queries behind their rotary embedding."""

    file_name = tables_file("transform_after_rope")
    rope = RopeStage.AFTER


Part = RotatedTransform
