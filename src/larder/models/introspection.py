"""Look at a model before trusting it: which layers call attention, and how."""

from __future__ import annotations

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Queries, Values
from larder.ops.attention import causal_attention


class AttentionSurvey:
    """Stands in for a pass, answers with plain causal attention, and notes each layer's shape."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        if layer in self.layers:
            raise ModelError(f"Layer {layer} called attention twice in one pass: not supported.")
        if values.shape != keys.shape:
            raise ModelError(
                f"Layer {layer} has keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                "(K S D): heads of different size are not supported."
            )
        self.layers[layer] = LayerSpec(
            layer, queries.shape[0], keys.shape[0], keys.shape[2], scaling, sliding_window
        )
        sections = (queries.shape[1],)
        out, _ = causal_attention(queries, keys, values, scaling, sections, sliding_window)
        return out.to(queries.dtype)
