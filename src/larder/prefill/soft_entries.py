"""Entries of learned tokens that are read behind a text before it is evicted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import UsageError
from larder.core.types import Mode
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.observers import LayerActivations
from larder.policy.providers.base import SoftEntryProvider
from larder.prefill.eviction_pass import LayerInputs

PLACEHOLDER = 0  # token whose embedding a learned vector replaces


def soft_entries(
    decoder: Decoder, caches: Sequence[SequenceCache], providers: Mapping[str, SoftEntryProvider]
) -> list[LayerInputs]:
    """Keys and values of each provider's tokens behind each cache, by layer and name; no cache
    changes.

    Raises:
        UsageError: the model has recurrent layers, whose state is that behind the text.
        ModelError: there are no weights for this model, or they do not fit it.
    """
    if decoder.spec.recurrent:
        raise UsageError(
            "The model has recurrent layers, which read no learned tokens at positions before the "
            "end of a text: choose a policy without restorekv()."
        )
    found: list[dict[int, dict[str, Tensor]]] = [{} for _ in caches]
    for name, provider in providers.items():

        def record(row: int, layer: int, recorded: LayerActivations, name: str = name) -> None:
            own = {"keys": recorded.keys.clone(), "values": recorded.values.clone()}
            named = {f"{name}.{side}": tensor for side, tensor in own.items()}
            found[row].setdefault(layer, {}).update(named)

        tokens = (PLACEHOLDER,) * provider.tokens
        rows = [
            BatchSegment(cache, tokens, shift=-min(len(tokens), cache.next_position))
            for cache in caches
        ]
        with decoder.soft_prompts.soft_pass(name, provider):
            decoder.read(rows, Mode.SCRATCH, record)
    return [*found]
