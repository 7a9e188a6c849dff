"""Check that trained tensors are of a model, by the fingerprints on their card."""

from __future__ import annotations

from collections.abc import Sequence

from larder.core.errors import ModelError

CARD = "card"  # key of the card in the metadata of a safetensors file


def check_fingerprint(name: str, fingerprints: Sequence[str], expected: str) -> None:
    """Check that a model is among those of a card.

    Args:
        name: of the trained tensors, or of their file.
        fingerprints: fingerprints of the card.

    Raises:
        ModelError: it is not.
    """
    if expected not in fingerprints:
        raise ModelError(
            f"{name} was trained for the model {', '.join(each[:12] for each in fingerprints)}, "
            f"not for this one ({expected[:12]}): train it for this model."
        )
