"""RoPE frequencies (`rope_scaling`) of a model: fixed, or fixed up to a number of tokens.

Cached keys stay valid as long as the frequencies that rotated them do. Long-rope (Phi-3) has two
sets of frequencies: one for texts up to the length that the model was first trained on, another for
all positions of longer texts. Larder uses the first set, and refuses the first token behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from packaging.version import Version

from larder.core.errors import ModelError

DYNAMIC, LONGROPE = "dynamic", "longrope"
ORIGINAL_LENGTH = "original_max_position_embeddings"


def check_rope(config: Any) -> None:
    """Check that a model's RoPE frequencies are fixed and read by the installed transformers.

    Raises:
        ModelError: cached keys would be rotated by changing or by wrong frequencies.
    """
    text = config.get_text_config().to_dict()
    _check_rope_is_read(text)
    if any(_type_of(rope) == DYNAMIC for rope in _declared_ropes(text)):
        raise ModelError(
            f"The model's RoPE is {DYNAMIC!r}: its frequencies change with the length, "
            "which would invalidate cached keys. Set a rope type with fixed frequencies "
            "(default, linear, yarn, llama3) in its config."
        )
    rope_limit(config)


def rope_limit(config: Any) -> int | None:
    """Tokens of a text up to which the frequencies are fixed; None without a limit.

    Raises:
        ModelError: the frequencies change at a length that the configuration does not name.
    """
    text = config.get_text_config().to_dict()
    ropes = [rope for rope in _declared_ropes(text) if _type_of(rope) == LONGROPE]
    limits = [rope.get(ORIGINAL_LENGTH) or text.get(ORIGINAL_LENGTH) for rope in ropes]
    if None in limits:
        raise ModelError(
            f"The model's RoPE is {LONGROPE!r}, but its configuration does not say at which length "
            f"its frequencies change: set {ORIGINAL_LENGTH} in it."
        )
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _declared_ropes(text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries with a rope type, by layer kind or not, in both spellings of a configuration."""
    for key in ("rope_parameters", "rope_scaling"):
        yield from _entries(text.get(key))


def _entries(tree: Any) -> Iterator[dict[str, Any]]:
    parts = tree if isinstance(tree, list) else []
    if isinstance(tree, dict):
        parts = list(tree.values())
        if "rope_type" in tree or "type" in tree:
            yield tree
    for part in parts:
        yield from _entries(part)


def _type_of(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type")))


def _check_rope_is_read(config: dict[str, Any]) -> None:
    """Reject the RoPE spelling of transformers 5, which version 4 silently ignores."""
    declared = config.get("rope_parameters")
    if not declared or Version(transformers.__version__) >= Version("5.0.0.dev0"):
        return
    read = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    read |= config.get("rope_scaling") or {}
    if any(read.get(key) != value for key, value in declared.items()):
        raise ModelError(
            "The model's config spells its RoPE as `rope_parameters`, which transformers "
            f"{transformers.__version__} does not read: install transformers 5 or later."
        )
