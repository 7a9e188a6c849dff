"""Kinds of attention that a model's configuration names, held against what its layers asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def check_attention_kinds(config: Any, layers: Sequence[LayerSpec]) -> None:
    """Refuse a model whose masks hide what Larder would show.

    A window or a chunk may live in the mask alone, which Larder does not take from the model, and
    may begin far behind the text that a model is verified with. Configurations of older
    transformers name no kinds; there a layer's window is all that is known.

    Args:
        layers: as surveyed, in order.

    Raises:
        ModelError: a layer is of a kind that its calls do not confirm.
    """
    told = config.get_text_config().to_dict()
    chunk, kinds = told.get("attention_chunk_size"), told.get("layer_types")
    for layer, kind in zip(layers, kinds or (), strict=False):
        _check_layer(layer, kind)
    if chunk:
        raise ModelError(
            f"The model attends in chunks of {chunk} tokens (attention_chunk_size), which Larder "
            "does not know: take a model without chunked attention."
        )


def _check_layer(layer: LayerSpec, kind: str) -> None:
    if kind not in (FULL, SLIDING):
        raise ModelError(
            f"Layer {layer.index} is of the kind {kind!r}; Larder knows {FULL!r} and {SLIDING!r}: "
            "take a model of these."
        )
    if (kind == SLIDING) != (layer.sliding_window is not None):
        raise ModelError(
            f"Layer {layer.index} is of the kind {kind!r}, but called attention with the window "
            f"{layer.sliding_window}: Larder cannot tell what it sees, so it is refused."
        )
