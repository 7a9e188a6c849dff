"""What was measured of a model, told layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Sequence

from larder.core.errors import ModelError
from larder.core.observation import Calibration


def split_by_layer(facts: Calibration, layers: Sequence[int]) -> dict[int, Calibration]:
    """The numbers of each layer, by layer index.

    Raises:
        ModelError: numbers cannot be shared out evenly.
    """
    parts = {name: split_evenly(name, values, len(layers)) for name, values in facts.items()}
    return {
        index: {name: part[place] for name, part in parts.items()}
        for place, index in enumerate(layers)
    }


def select_layers(facts: Calibration, known: Sequence[int], layers: Sequence[int]) -> Calibration:
    """The numbers of some of the layers that are known, in the same order.

    Raises:
        ModelError: as `split_by_layer`.
    """
    own = split_by_layer(facts, known)
    return {name: tuple(n for layer in layers for n in own[layer][name]) for name in facts}


def split_evenly(name: str, values: tuple[float, ...], layers: int) -> list[tuple[float, ...]]:
    """Equally many consecutive numbers for each layer."""
    if layers and len(values) % layers:
        raise ModelError(
            f"The calibration {name!r} has {len(values)} numbers, which {layers} managed layers "
            "cannot share alike: have it measured again for this model."
        )
    each = len(values) // max(layers, 1)
    return [values[place * each : (place + 1) * each] for place in range(layers)]


def mean_per_kv_head(values: tuple[float, ...], kv_heads: int) -> tuple[float, ...]:
    """The mean of the numbers that belong to each kv head; none of none.

    Raises:
        ModelError: they belong to no such heads.
    """
    if len(values) % kv_heads:
        raise ModelError(
            f"A layer of {kv_heads} kv heads was calibrated by {len(values)} numbers, which cannot "
            "be shared among them: have it measured again for this model."
        )
    return tuple(sum(own) / len(own) for own in split_evenly("heads", values, kv_heads) if own)
