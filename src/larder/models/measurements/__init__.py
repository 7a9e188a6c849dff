"""Measurements of a model: one per file, named after the file, or in `VARIANTS`."""

VARIANTS = {  # module and class of the measurements that differ from that of a file in a number
    "induction": ("echo", "Induction"),
    "transform_after_rope": ("transform", "RotatedTransform"),
    "transform_full_metric": ("transform", "FullMetricTransform"),
    "transform_unweighted": ("transform", "UnweightedTransform"),
}
