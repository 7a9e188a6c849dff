"""Tensors of learned tokens and of low-rank updates of the linear layers that read them."""

from __future__ import annotations

from larder.core.types import NamedTensors, TensorShapes

EMBEDDINGS = "embeddings"  # tensor of the learned tokens, beside those of the first layer
DOWN, UP = ".down", ".up"  # ends of the names of both factors of an update


def soft_token_shapes(count: int, width: int, tensors: NamedTensors) -> TensorShapes:
    """Shapes of the tensors of a layer; sizes of its linear layers are read from `tensors`.

    Args:
        count: learned tokens.
        width: size of a hidden state.
    """
    linears = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    found = dict[str, tuple[int, ...]]()
    if EMBEDDINGS in tensors:
        found[EMBEDDINGS] = (count, width)
    for name in linears:
        down, up = tensors[f"{name}{DOWN}"], tensors.get(f"{name}{UP}")
        found[f"{name}{DOWN}"] = (len(down), *down.shape[1:2])
        found[f"{name}{UP}"] = (0 if up is None else len(up), len(down))
    return found
