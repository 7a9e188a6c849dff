"""Forms of the layers of a cache: one per file, named after the file, or in `VARIANTS`."""

VARIANTS = {"blended": ("dense", "BlendedLayer")}  # module and class
