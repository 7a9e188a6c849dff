"""Texts put together from pieces that were read elsewhere, with little of them read again.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
(2024), arXiv:2405.16444, section 4. Kept keys are turned to their new positions; the first layer
is computed for every token, and in the second each kept token's deviation is the squared distance
of its new values from the kept ones. The share of tokens that deviate most, and all that were never
read, go through the deeper layers, where each attends to kept and new keys alike. As in the
released code the choice is made once; the paper's narrows it from layer to layer. In the layer of
the choice, keys and values are the new ones for every token, since they are known by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from larder.cache.sequence import SequenceCache
from larder.cache.spec import CacheForm, CacheSpec
from larder.core.errors import BadParameter, CacheError, ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Queries, Values
from larder.models.decoder import Decoder
from larder.ops.rope import rerotate

RECOMPUTE_SHARE = 0.16  # as in the released code
SELECTION_LAYER = 1  # the layer whose values tell who deviates


@dataclass(frozen=True)
class ContextChunk:
    """Some tokens of a text.

    Args:
        ids: the tokens.
        cache: a dense one that has read them, in whatever text; None for tokens to be read.
        start: the true position of the first of them there.
    """

    ids: tuple[int, ...]
    cache: SequenceCache | None = None
    start: int = 0


@dataclass(frozen=True)
class BlendedCache:
    """A text that was put together.

    Args:
        cache: a dense one, as if it had read the text.
        chosen: positions of the tokens that went through all layers.
        deviations: of every token in the layer of the choice; infinite for those never read.
    """

    cache: SequenceCache
    chosen: Int[Tensor, " M"]
    deviations: Float[Tensor, " N"]


@torch.no_grad()
def blend(
    decoder: Decoder, pieces: Sequence[ContextChunk], share: float = RECOMPUTE_SHARE
) -> BlendedCache:
    """Put pieces together into one text.

    Args:
        share: of the kept tokens that are computed again in all layers, in [0, 1]; 1 reads
            everything.

    Raises:
        BadParameter: the share is none, or there are no tokens.
        CacheError: a piece's cache does not hold all of its tokens.
        ModelError: the model has sliding windows, a single layer, or turns keys in an unknown way.
    """
    ids = [token for piece in pieces for token in piece.ids]
    if not 0 <= share <= 1 or not ids:
        raise BadParameter(f"blend needs tokens and a share in [0, 1], got {len(ids)} and {share}.")
    _check(decoder.spec)
    fusion = _Fusion(decoder.spec, pieces, share)
    layer = decoder.body.layers[SELECTION_LAYER]
    places = torch.arange(len(ids), device=decoder.spec.device)
    hooks = [layer.register_forward_pre_hook(fusion.choose, with_kwargs=True)]
    for later in decoder.body.layers[SELECTION_LAYER + 1 :]:
        hooks.append(later.register_forward_pre_hook(fusion.narrow, with_kwargs=True))
    try:
        given = torch.tensor([ids], device=places.device)
        decoder.body(input_ids=given, position_ids=places[None], use_cache=False, larder=fusion)
    finally:
        for hook in hooks:
            hook.remove()
    return BlendedCache(fusion.cache(), fusion.chosen, fusion.deviations)


class _ValuesCaptured(Exception):  # noqa: N818, no error
    """Keys and values of the layer are there: the rest of it is not needed."""


class _Fusion:
    """Stands in for a pass: holds kept keys and values, and takes new ones over."""

    def __init__(self, spec: ModelSpec, pieces: Sequence[ContextChunk], share: float) -> None:
        self._spec, self._share = spec, share
        kept = [_cached_state(piece) for piece in pieces]
        self._is_new = torch.cat([flags for flags, _ in kept]).to(spec.device)
        self._keys, self._values = _joined_layers(spec, pieces, [state for _, state in kept])
        self.chosen = torch.arange(len(self._is_new), device=spec.device)
        self.deviations = torch.zeros(len(self._is_new), device=spec.device)
        self._is_choosing = False

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del sliding_window
        if self._is_choosing:
            self._judge(layer, keys, values)
            raise _ValuesCaptured
        if layer != SELECTION_LAYER:
            self._keys[layer][:, self.chosen] = keys
            self._values[layer][:, self.chosen] = values
        group = self._spec.layers[layer].group
        places = torch.arange(len(self._is_new), device=queries.device)
        visible = places[None] <= self.chosen[:, None]  # [M, N]
        every = (t[layer].repeat_interleave(group, 0)[None] for t in (self._keys, self._values))
        return scaled_dot_product_attention(
            queries[None], *every, attn_mask=visible, scale=scaling
        )[0]

    def choose(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Look at the layer's keys and values for all tokens, then go on with those chosen."""
        self._is_choosing = True
        try:
            layer.forward(*args, **options)
        except _ValuesCaptured:
            pass
        finally:
            self._is_choosing = False
        args, options = _select_states(args, options, self.chosen)
        return _select_positions(args, options, self.chosen)

    def narrow(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What enters a deeper layer is fewer tokens; so must be their positions."""
        del layer
        return _select_positions(args, options, self.chosen)

    def cache(self) -> SequenceCache:
        """What was put together, taken over."""
        count = len(self._is_new)
        state: dict[str, Tensor] = {}
        for layer in self._spec.layers:
            state[f"{layer.index}.keys"] = self._keys[layer.index]
            state[f"{layer.index}.values"] = self._values[layer.index]
            state[f"{layer.index}.positions"] = torch.arange(count, dtype=torch.int32)
        meta = CacheSpec(CacheForm.DENSE).meta() | {"next_position": str(count)}
        return SequenceCache.adopt(self._spec, state, meta)

    def _judge(self, layer: int, keys: Keys, values: Values) -> None:
        """Who deviates most, and who is new, goes on."""
        away = (values.float() - self._values[layer].float()).square().sum((0, 2))  # [N]
        self.deviations = away.masked_fill(self._is_new, math.inf)
        news = int(self._is_new.sum())
        count = news + math.ceil(self._share * (len(away) - news))
        order = torch.argsort(-self.deviations, stable=True)
        # The last token says what comes next: it is always computed.
        last = torch.tensor([len(away) - 1], device=away.device)
        self.chosen = torch.cat([order[:count], last]).unique()
        self._keys[layer], self._values[layer] = keys.clone(), values.clone()


def _cached_state(piece: ContextChunk) -> tuple[Bool[Tensor, " N"], dict[str, Tensor]]:
    """Which tokens of a piece were never read, and the state of the cache that has the others."""
    count = len(piece.ids)
    if piece.cache is None:
        return torch.ones(count, dtype=torch.bool), {}
    cache, stop = piece.cache, piece.start + count
    state = cache.state() if cache.cache_spec.form is CacheForm.DENSE else {}
    positions = state.get("0.positions", torch.empty(0))
    if piece.start < 0 or not torch.equal(positions.cpu(), torch.arange(cache.next_position)):
        raise CacheError(
            "Only of a dense cache that holds everything it has read can pieces be taken: read "
            "them under the policy `full`."
        )
    if stop > cache.next_position:
        raise CacheError(
            f"A piece of {count} tokens at {piece.start} ends behind the {cache.next_position} "
            "that its cache has read."
        )
    return torch.zeros(count, dtype=torch.bool), state


def _joined_layers(
    spec: ModelSpec, pieces: Sequence[ContextChunk], states: Sequence[dict[str, Tensor]]
) -> tuple[list[Keys], list[Values]]:
    """Keys and values of all pieces, by layer, turned to where they stand now; zeros where new."""
    count = sum(len(piece.ids) for piece in pieces)
    keys: list[Keys] = []
    values: list[Values] = []
    for layer in spec.layers:
        shape = (layer.kv_heads, count, layer.head_dim)
        keys.append(torch.zeros(shape, dtype=spec.dtype, device=spec.device))
        values.append(torch.zeros_like(keys[-1]))
        radians = torch.tensor(layer.radians or (), device=spec.device)
        start = 0
        for piece, state in zip(pieces, states, strict=True):
            stop = start + len(piece.ids)
            if state:
                own = slice(piece.start, piece.start + len(piece.ids))
                old = torch.arange(own.start, own.stop, device=spec.device)
                held = state[f"{layer.index}.keys"][:, own]
                new = torch.arange(start, stop, device=spec.device)
                keys[-1][:, start:stop] = rerotate(held, old, new, radians)
                values[-1][:, start:stop] = state[f"{layer.index}.values"][:, own]
            start = stop
    return keys, values


def _select_states(
    args: tuple[Any, ...], options: dict[str, Any], chosen: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments, of the chosen tokens alone."""
    if args:
        return (args[0][:, chosen], *args[1:]), options
    return args, options | {"hidden_states": options["hidden_states"][:, chosen]}


def _select_positions(
    args: tuple[Any, ...], options: dict[str, Any], chosen: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with the positions of the chosen tokens alone."""
    narrow = dict(options)
    if (turn := narrow.get("position_embeddings")) is not None:
        narrow["position_embeddings"] = tuple(part[:, chosen] for part in turn)
    if (places := narrow.get("position_ids")) is not None:
        narrow["position_ids"] = places[:, chosen]
    return args, narrow


def _check(spec: ModelSpec) -> None:
    if len(spec.managed) < len(spec.layers):
        raise ModelError("Pieces cannot be blended for a model with sliding windows: read them.")
    if len(spec.layers) <= SELECTION_LAYER or any(layer.radians is None for layer in spec.layers):
        raise ModelError(
            "Pieces cannot be blended for a model of one layer, or one whose rotation of keys is "
            "not known: read them."
        )
