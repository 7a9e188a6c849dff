"""Methods of `larder train` on hidden states: one per file, or in `VARIANTS`."""

VARIANTS = {"kvzap_mlp": ("kvzap", "KVzapPerceptron")}  # module and class
