"""Storage codecs of keys and values: a codec is named after its file, or stands in `VARIANTS`."""

VARIANTS = {  # module and class of the codecs that differ from the codec of a file in a number
    "cachegen": ("entropy", "CacheGen"),
    "entropy_coarse": ("entropy", "CoarseEntropy"),
    "entropy_fine": ("entropy", "FineEntropy"),
    "int8": ("int4", "Int8"),
    "kvtc16": ("kvtc", "Kvtc16"),
    "predictive12": ("predictive", "Predictive12"),
    "predictive16": ("predictive", "Predictive16"),
}
