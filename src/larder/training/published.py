"""Weights that others published, in safetensors: adopted for a model whose shapes they fit."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open

from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.models.learned_weights import (
    SUFFIX,
    Card,
    LearnedWeights,
    check_learned,
    split_layers,
)
from larder.training.base import METHODS

# First parts of the names of tensors in released files; NVIDIA's KVzap uses both.
PREFIXES = ("layers", "module_list")


def adopt_published(path: Path, method: str, spec: ModelSpec) -> LearnedWeights:
    """Weights of a published file, with a card that names the file.

    Tensors are named `layers.<n>.<tensor>` or `module_list.<n>.<tensor>`. Whether they were made
    for this model cannot be seen from the file; their shapes must fit.

    Raises:
        ModelError: the file cannot be read, or has other tensors.
    """
    if path.suffix != SUFFIX:
        raise ModelError(
            f"{path} does not end in {SUFFIX}: other formats can run code, convert it where you "
            "trust it."
        )
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, "pt") as tensors:
            given = {key: tensors.get_tensor(key).float() for key in tensors.keys()}  # noqa: SIM118
        prefix = next(each for each in PREFIXES if all(k.startswith(f"{each}.") for k in given))
        layers = split_layers(given, prefix)
    except (SafetensorError, OSError, ValueError, StopIteration) as error:
        raise ModelError(
            f"{path} holds no weights by layer ({error}): tensors must be named "
            "layers.<n>.<tensor>."
        ) from error
    card = Card(method, (spec.fingerprint,), f"sha256:{digest}")
    learned = LearnedWeights(card, layers)
    check_learned(learned, spec, method, METHODS.load(method)().gate())
    return learned
