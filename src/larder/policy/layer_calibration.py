"""Calibration numbers of a model, split by layer and kv head."""

from __future__ import annotations

from collections.abc import Sequence

from larder.core.errors import ModelError
from larder.core.observation import Calibration


def split_by_layer(calibration: Calibration, layers: Sequence[int]) -> dict[int, Calibration]:
    """Calibration of each layer, by layer index.

    Raises:
        ModelError: the numbers do not divide evenly over the layers.
    """
    parts = {name: split_evenly(name, values, len(layers)) for name, values in calibration.items()}
    return {
        index: {name: part[layer_index] for name, part in parts.items()}
        for layer_index, index in enumerate(layers)
    }


def select_layers(
    calibration: Calibration, all_layers: Sequence[int], layers: Sequence[int]
) -> Calibration:
    """Calibration of a selection of layers, in the order of `layers`.

    Args:
        all_layers: all layers that the calibration covers.
        layers: layers to select.

    Raises:
        ModelError: the numbers do not divide evenly over the layers.
    """
    by_layer = split_by_layer(calibration, all_layers)
    return {
        name: tuple(n for layer in layers for n in by_layer[layer][name]) for name in calibration
    }


def split_evenly(name: str, values: tuple[float, ...], layers: int) -> list[tuple[float, ...]]:
    """Consecutive numbers of each layer, equally many.

    Args:
        name: name of the calibration, for the error.

    Raises:
        ModelError: the numbers do not divide evenly.
    """
    if layers and len(values) % layers:
        raise ModelError(
            f"The calibration {name!r} has {len(values)} numbers, which {layers} managed layers "
            "cannot share evenly: measure it again for this model."
        )
    each = len(values) // max(layers, 1)
    return [values[layer_index * each : (layer_index + 1) * each] for layer_index in range(layers)]


def mean_per_kv_head(values: tuple[float, ...], kv_heads: int) -> tuple[float, ...]:
    """Mean of the numbers of each kv head; empty for no numbers.

    Raises:
        ModelError: the numbers do not divide evenly over the kv heads.
    """
    if len(values) % kv_heads:
        raise ModelError(
            f"A layer of {kv_heads} kv heads was calibrated by {len(values)} numbers, which cannot "
            "be divided among them: measure it again for this model."
        )
    return tuple(
        sum(numbers) / len(numbers)
        for numbers in split_evenly("heads", values, kv_heads)
        if numbers
    )
