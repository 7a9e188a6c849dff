"""CacheBlend: one cache from chunks that were prefilled separately, with selective recompute.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
(2024), arXiv:2405.16444, section 4. Cached keys are rotated to their new positions. The first layer
is computed for every token; in the second, the deviation of a cached token is the squared distance
of its new values from the cached ones. The share of cached tokens that deviate most, and all
uncached tokens, pass through the deeper layers, where each attends to cached and new keys alike.
As in the released code the selection happens once; the paper narrows it from layer to layer. In the
selection layer every token uses its new keys and values, since they are known by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, CacheError, ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Queries, Values
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.ops.attention import masked_attention

RECOMPUTE_SHARE = 0.16  # as in the released code
SELECTION_LAYER = 1  # layer whose values determine the deviations


@dataclass(frozen=True)
class ContextChunk:
    """Consecutive tokens of a text, with their entries as read in another text, if there are any.

    Args:
        ids: the tokens.
        entries: of all of them, in any text; None for uncached tokens.

    Raises:
        CacheError: the entries are of more or fewer tokens.
    """

    ids: tuple[int, ...]
    entries: ChunkEntries | None = None

    def __post_init__(self) -> None:
        if self.entries is not None and self.entries.num_tokens != len(self.ids):
            raise CacheError(
                f"A chunk of {len(self.ids)} tokens has entries of {self.entries.num_tokens}: give "
                "those of its own tokens."
            )


@dataclass(frozen=True)
class BlendedEntries:
    """Result of blending.

    Args:
        entries: of the whole text, from position 0 on.
        chosen: positions of the tokens that were computed in all layers.
        deviations: of every token in the selection layer; infinite for uncached tokens.
    """

    entries: ChunkEntries
    chosen: Int[Tensor, " M"]
    deviations: Float[Tensor, " N"]

    def cache(self, spec: ModelSpec) -> SequenceCache:
        """Dense cache with copies of the entries."""
        cache = SequenceCache(spec, "dense")
        cache.allocate(self.entries.num_tokens)
        self.entries.append_to(cache)
        return cache


@torch.no_grad()
def blend(
    decoder: Decoder,
    chunks: Sequence[ContextChunk],
    share: float = RECOMPUTE_SHARE,
    num_exact: int = 0,
) -> BlendedEntries:
    """Entries of the concatenated chunks.

    Args:
        share: of the cached tokens that are recomputed in all layers, in [0, 1]; 1 computes
            every token.
        num_exact: first tokens, whose entries were read at the beginning of this very text. They
            do not deviate: the share is of the cached tokens behind them.

    Raises:
        BadParameter: the share is out of range, or there are no tokens.
        ModelError: the model has sliding windows, a single layer, or an unknown key rotation.
    """
    ids = [token for chunk in chunks for token in chunk.ids]
    if not 0 <= share <= 1 or not ids:
        raise BadParameter(f"blend needs tokens and a share in [0, 1], got {len(ids)} and {share}.")
    check_blendable(decoder.spec)
    fusion = _Fusion(decoder.spec, chunks, share, num_exact)
    layer = decoder.body.layers[SELECTION_LAYER]
    hooks = [layer.register_forward_pre_hook(fusion.choose, with_kwargs=True)]
    for later in decoder.body.layers[SELECTION_LAYER + 1 :]:
        hooks.append(later.register_forward_pre_hook(fusion.narrow, with_kwargs=True))
    with forward_hooks(hooks):
        decoder.forward_uncached(ids, fusion)
    return BlendedEntries(fusion.entries(), fusion.chosen, fusion.deviations)


class _ValuesCaptured(Exception):  # noqa: N818, no error
    """Control flow: keys and values of the layer are known, the rest of it is skipped."""


class _Fusion:
    """Layer attention over cached keys and values that replaces those of the selected tokens."""

    def __init__(
        self, spec: ModelSpec, chunks: Sequence[ContextChunk], share: float, num_exact: int
    ) -> None:
        self._spec, self._share, self._num_exact = spec, share, num_exact
        flags = [torch.full((len(one.ids),), one.entries is None) for one in chunks]
        self._is_new = torch.cat(flags).to(spec.device)
        self._keys, self._values = joined_layers(spec, chunks)
        self.chosen = torch.arange(len(self._is_new), device=spec.device)
        self.deviations = torch.zeros(len(self._is_new), device=spec.device)
        self._is_choosing = False

    def attend(self, inputs: AttentionInputs) -> Queries:
        layer = inputs.layer
        if self._is_choosing:
            self._judge(layer, inputs.keys, inputs.values)
            raise _ValuesCaptured
        if layer != SELECTION_LAYER:
            self._keys[layer][:, self.chosen] = inputs.keys
            self._values[layer][:, self.chosen] = inputs.values
        positions = torch.arange(len(self._is_new), device=inputs.queries.device)
        visible = positions[None] <= self.chosen[:, None]  # [M, N]
        queries, keys, values = (
            inputs.queries_at(self.chosen),
            self._keys[layer],
            self._values[layer],
        )
        return inputs.output(
            masked_attention(queries, keys, values, inputs.scaling, visible, inputs.softcap)
        )

    def choose(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Hook of the selection layer: select tokens by its values, and continue with them."""
        self._is_choosing = True
        try:
            layer.forward(*args, **options)
        except _ValuesCaptured:
            pass
        finally:
            self._is_choosing = False
        args, options = select_states(args, options, self.chosen)
        return select_positions(args, options, self.chosen)

    def narrow(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Hook of a deeper layer: narrow its positions to those of the selected tokens."""
        return select_positions(args, options, self.chosen)

    def entries(self) -> ChunkEntries:
        """All keys and values."""
        return ChunkEntries(tuple(self._keys), tuple(self._values))

    def _judge(self, layer: int, keys: Keys, values: Values) -> None:
        """Select the new tokens and those that deviate most, for the deeper layers."""
        away = (values.float() - self._values[layer].float()).square().sum((0, 2))  # [N]
        self.deviations = away.masked_fill(self._is_new, math.inf)
        behind = self._is_new[self._num_exact :]
        news = int(behind.sum())
        count = news + math.ceil(self._share * (len(behind) - news))
        order = torch.argsort(-self.deviations[self._num_exact :], stable=True) + self._num_exact
        # The last token predicts the next one: it is always computed.
        last = torch.tensor([len(away) - 1], device=away.device)
        self.chosen = torch.cat([order[:count], last]).unique()
        self._keys[layer], self._values[layer] = keys.clone(), values.clone()


def joined_layers(
    spec: ModelSpec, chunks: Sequence[ContextChunk]
) -> tuple[list[Keys], list[Values]]:
    """Keys and values of all chunks by layer, keys rotated to their new positions; zeros if new."""
    keys: list[Keys] = []
    values: list[Values] = []
    count = sum(len(chunk.ids) for chunk in chunks)
    for layer in spec.layers:
        shape = (layer.kv_heads, count, layer.head_dim)
        keys.append(torch.zeros(shape, dtype=spec.dtype, device=spec.device))
        values.append(torch.zeros_like(keys[-1]))
    start = 0
    for chunk in chunks:
        stop = start + len(chunk.ids)
        if chunk.entries is not None:
            moved = chunk.entries.moved_to(start, spec)
            for index in range(len(spec.layers)):
                keys[index][:, start:stop] = moved.keys[index]
                values[index][:, start:stop] = moved.values[index]
        start = stop
    return keys, values


def select_states(
    args: tuple[Any, ...], options: dict[str, Any], chosen: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer, hidden states restricted to the selected tokens."""
    if args:
        return (args[0][:, chosen], *args[1:]), options
    return args, options | {"hidden_states": options["hidden_states"][:, chosen]}


def select_positions(
    args: tuple[Any, ...], options: dict[str, Any], chosen: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer, positions restricted to the selected tokens."""
    narrow = dict(options)
    if (turn := narrow.get("position_embeddings")) is not None:
        narrow["position_embeddings"] = tuple(part[:, chosen] for part in turn)
    if (positions := narrow.get("position_ids")) is not None:
        narrow["position_ids"] = positions[:, chosen]
    return args, narrow


def check_blendable(spec: ModelSpec) -> None:
    """Raise ModelError if chunks cannot be moved in the cache of a model."""
    if spec.recurrent or len(spec.managed) < len(spec.layers):
        raise ModelError(
            "Chunks cannot be blended for a model with sliding windows, recurrent layers or layers "
            "that share entries: prefill the whole text."
        )
    if len(spec.layers) <= SELECTION_LAYER or any(layer.radians is None for layer in spec.layers):
        raise ModelError(
            "Chunks cannot be blended for a model of one layer, or one whose key rotation is "
            "unknown: prefill the whole text."
        )
