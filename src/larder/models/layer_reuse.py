"""Entries of one model used by another of the same shape, with a range of layers computed again.

Liu et al., "DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving" (2024),
arXiv:2411.02820. Models that were tuned from one base have caches that differ in few layers. A text
that the sender has read is handed over as its keys and values, and the hidden states before the
first of the layers that the receiver computes itself: a contiguous range, found beforehand by
trying ranges on a text and taking those that no other beats in both layers computed and divergence
(`range_profiles`, `pareto_ranges`). All layers is the receiver's own reading, none a plain copy.
Known to us from the paper's abstract and secondary accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import ModelError
from larder.core.types import AppendKind, Mode
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.cacheblend import check_blendable
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment

LayerRange = tuple[int, int]  # of layers, [start, stop)


@dataclass(frozen=True)
class SharedReading:
    """Part of a text's cache that a sender hands over.

    Args:
        ids: the tokens.
        entries: its keys and values, from position 0 on.
        states: hidden states before each layer that a range may start at, by its index; a range
            from the first layer on starts with the receiver's embeddings.
    """

    ids: tuple[int, ...]
    entries: ChunkEntries
    states: dict[int, Float[Tensor, "1 N hidden"]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.entries.nbytes + sum(own.nbytes for own in self.states.values())


@dataclass(frozen=True)
class RangeProfile:
    """Costs and gains of a range of layers.

    Args:
        layers: the range that the receiver computes.
        divergence: Kullback-Leibler divergence of its next tokens from those of its own reading,
            mean over a continuation, in nats.
    """

    layers: LayerRange
    divergence: float

    @property
    def num_layers(self) -> int:
        """Number of computed layers."""
        return self.layers[1] - self.layers[0]


@torch.no_grad()
def share_reading(sender: Decoder, ids: tuple[int, ...], starts: Iterable[int]) -> SharedReading:
    """Read a text and hand it over.

    Args:
        starts: layers that ranges may start at.

    Raises:
        ModelError: the model has sliding windows, recurrent layers or an unknown rotation.
    """
    check_blendable(sender.spec)
    states, cache = dict[int, Tensor](), SequenceCache(sender.spec, "dense")

    def keep(index: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            states[index] = (args[0] if args else named["hidden_states"]).clone()

        return record

    layers = sender.body.layers
    with forward_hooks(
        layers[start].register_forward_pre_hook(keep(start), with_kwargs=True)
        for start in sorted(set(starts))
    ):
        segment = BatchSegment(cache, ids, append_kind=AppendKind.TEXT)
        sender.read([segment], Mode.APPEND)
    return SharedReading(ids, ChunkEntries.of(cache, 0, len(ids)), states)


@torch.no_grad()
def receive_reading(receiver: Decoder, reading: SharedReading, layers: LayerRange) -> ChunkEntries:
    """Entries of a text for a receiver, which computes a range of layers from the sender's states.

    Raises:
        ModelError: the models differ in shape, or the states before the range were not handed over.
    """
    check_blendable(receiver.spec)
    _check_shape(receiver, reading)
    start, stop = layers
    keys, values = list(reading.entries.keys), list(reading.entries.values)
    if start >= stop:
        return reading.entries
    if start and start not in reading.states:
        raise ModelError(
            f"A range that starts at layer {start} needs the sender's states before it, but those "
            f"before {sorted(reading.states)} were handed over: name it in `starts`."
        )

    def keep(inputs: AttentionInputs) -> None:
        keys[inputs.layer], values[inputs.layer] = inputs.keys.clone(), inputs.values.clone()

    states = reading.states.get(start) if start else None
    _run_layers(receiver, reading.ids, states, layers, CausalAttention(keep))
    return ChunkEntries(tuple(keys), tuple(values))


def range_profiles(
    sender: Decoder,
    receiver: Decoder,
    ids: tuple[int, ...],
    continuation: tuple[int, ...],
    ranges: Sequence[LayerRange],
) -> list[RangeProfile]:
    """Divergence of a continuation of a text under each range, against the receiver's own reading.

    Raises:
        ModelError: as in `receive_reading`.
    """
    reading = share_reading(sender, ids, (start for start, stop in ranges if start < stop))
    own = SequenceCache(receiver.spec, "dense")
    receiver.read([BatchSegment(own, ids, append_kind=AppendKind.TEXT)], Mode.APPEND)
    exact = _log_probabilities(receiver, own, continuation)
    profiles = list[RangeProfile]()
    for layers in ranges:
        cache = SequenceCache(receiver.spec, "dense")
        receive_reading(receiver, reading, layers).append_to(cache)
        near = _log_probabilities(receiver, cache, continuation)
        away = (exact.exp() * (exact - near)).sum(-1).mean()
        profiles.append(RangeProfile(layers, float(away)))
    return profiles


def pareto_ranges(profiles: Sequence[RangeProfile]) -> list[RangeProfile]:
    """Ranges that no other beats in both, fewest layers first."""
    best = list[RangeProfile]()
    for one in sorted(profiles, key=lambda own: (own.num_layers, own.divergence, own.layers)):
        if not best or one.divergence < best[-1].divergence:
            best.append(one)
    return best


class _LayerArguments(Exception):  # noqa: N818, no error
    """Control flow: the arguments that the model hands to its layers are known."""


def _run_layers(
    decoder: Decoder,
    ids: tuple[int, ...],
    states: Float[Tensor, "1 N hidden"] | None,
    layers: LayerRange,
    attention: CausalAttention,
) -> None:
    """Run a range of layers on hidden states, with the arguments that the model would give them.

    Args:
        states: before the first of the layers; None for the model's own embeddings.
    """
    given = dict[str, Any]()

    def take(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.update(named)
        if args:
            given["hidden_states"] = args[0]
        raise _LayerArguments

    modules = decoder.body.layers
    hook = modules[0].register_forward_pre_hook(take, with_kwargs=True)
    with forward_hooks([hook]):
        try:
            decoder.forward_uncached(ids, attention)
        except _LayerArguments:
            pass
    embedded = given.pop("hidden_states")
    states = embedded if states is None else states.to(embedded)
    with decoder.attention:
        for module in modules[layers[0] : layers[1]]:
            states = module(states, **given)
            states = states[0] if isinstance(states, tuple) else states


def _check_shape(receiver: Decoder, reading: SharedReading) -> None:
    spec = receiver.spec
    shapes = [(layer.kv_heads, layer.head_dim) for layer in spec.layers]
    given = [(side.shape[0], side.shape[2]) for side in reading.entries.keys]
    widths = {own.shape[-1] for own in reading.states.values()} | {spec.width}
    if shapes != given or len(widths) > 1:
        raise ModelError(
            f"The sender's {len(given)} layers of {given[0]} (heads, size) and states of "
            f"{sorted(widths)} numbers are not those of the receiver, {len(shapes)} layers of "
            f"{shapes[0]}: take models that were tuned from one base."
        )


def _log_probabilities(
    decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]
) -> Float[Tensor, "N V"]:
    segment = BatchSegment(cache, ids)
    return decoder.forward_logits([segment], Mode.SCRATCH, range(len(ids))).double().log_softmax(-1)
