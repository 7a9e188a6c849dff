"""Entries of one model used by another of the same shape, with a range of layers computed again.

Liu et al., "DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving" (2024),
arXiv:2411.02820. Models that were tuned from one base have caches that differ in few layers. A text
that the sender has read is handed over as its keys and values, and the hidden states before the
first of the layers that the receiver computes itself: a contiguous range, found beforehand by
trying ranges on a text and taking those that no other beats in both layers computed and divergence
(`range_profiles`, `pareto_ranges`). All layers is the receiver's own reading, none a plain copy.
Known to us from the paper's abstract and secondary accounts. `larder.prefill.layer_reuse` hands
contexts from one model's chunks to another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import ModelError
from larder.core.types import AppendKind, Mode, Queries, TokenIds
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, RenumberedAttention
from larder.models.batch_segment import BatchSegment
from larder.models.cacheblend import check_blendable
from larder.models.decoder import Decoder
from larder.models.introspection import call_uncached, check_unchanged
from larder.ops.attention import causal_attention, masked_attention, merge_attention

LayerRange = tuple[int, int]  # of layers, [start, stop)


@dataclass(frozen=True)
class SharedReading:
    """Part of a text's cache that a sender hands over.

    Args:
        ids: the tokens.
        entries: its keys and values, from the position that it was read at.
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
def share_reading(sender: Decoder, ids: TokenIds, starts: Iterable[int]) -> SharedReading:
    """Read a text and hand it over.

    Args:
        starts: layers that ranges may start at.

    Raises:
        ModelError: the model has sliding windows, recurrent layers or an unknown rotation.
    """
    check_blendable(sender.spec)
    cache = SequenceCache(sender.spec, "dense")
    with recorded_states(sender, starts) as recorder:
        segment = BatchSegment(cache, ids, append_kind=AppendKind.TEXT)
        sender.read([segment], Mode.APPEND)
    return SharedReading(ids, ChunkEntries.of(cache, 0, len(ids)), recorder.states())


class StateRecorder:
    """Hidden states before some layers, of all tokens that a decoder reads meanwhile.

    Args:
        starts: indices of the layers.
    """

    def __init__(self, starts: Iterable[int]) -> None:
        self._blocks: dict[int, list[Tensor]] = {start: [] for start in sorted(set(starts))}

    @property
    def starts(self) -> tuple[int, ...]:
        """Indices of the layers, ascending."""
        return tuple(self._blocks)

    def states(self) -> dict[int, Float[Tensor, "1 N hidden"]]:
        """States of all tokens so far, by layer; layers without any are left out."""
        return {start: torch.cat(own, 1) for start, own in self._blocks.items() if own}

    def hook(self, start: int) -> Any:
        """Forward pre-hook of a decoder layer."""

        def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            states = args[0] if args else named["hidden_states"]
            self._blocks[start].append(states.detach().clone())

        return record


@contextmanager
def recorded_states(decoder: Decoder, starts: Iterable[int]) -> Iterator[StateRecorder]:
    """Context in which the states before some layers are recorded.

    Raises:
        ModelError: the model has no layer of such an index.
    """
    recorder, layers = StateRecorder(starts), decoder.body.layers
    check_layers(decoder, recorder.starts)
    with forward_hooks(
        layers[start].register_forward_pre_hook(recorder.hook(start), with_kwargs=True)
        for start in recorder.starts
    ):
        yield recorder


def check_layers(decoder: Decoder, layers: Iterable[int]) -> None:
    """Check indices of layers.

    Raises:
        ModelError: the model has no such layer.
    """
    count = len(decoder.spec.layers)
    for layer in layers:
        if not 0 <= layer < count:
            raise ModelError(
                f"Layer {layer} is none of the model, which has {count}: name one from 0 to "
                f"{count - 1}."
            )


@torch.no_grad()
def receive_reading(
    receiver: Decoder,
    reading: SharedReading,
    layers: LayerRange,
    before: ChunkEntries | None = None,
) -> ChunkEntries:
    """Entries of a text for a receiver, which computes a range of layers from the sender's states.

    Args:
        before: the receiver's entries of the text that this one was read behind, from position 0
            on; None for a text that begins there.

    Raises:
        ModelError: the models differ in shape, or the states before the range were not handed over.
    """
    check_unchanged(receiver.module, receiver.spec)
    check_blendable(receiver.spec)
    _check_shape(receiver, reading)
    start, stop = layers
    attention = _AttentionBehind(before)
    sent = reading.entries.moved_to(attention.start, receiver.spec)
    if start >= stop:
        return sent
    check_layers(receiver, (start, stop - 1))
    if start and start not in reading.states:
        raise ModelError(
            f"A range that starts at layer {start} needs the sender's states before it, but those "
            f"before {sorted(reading.states)} were handed over: name it in `starts`."
        )
    keys, values = list(sent.keys), list(sent.values)
    states = reading.states.get(start) if start else None
    _run_layers(receiver, reading.ids, states, layers, attention)
    for layer, (own_keys, own_values) in attention.computed.items():
        keys[layer], values[layer] = own_keys, own_values
    return ChunkEntries(tuple(keys), tuple(values), attention.start)


def range_profiles(
    sender: Decoder,
    receiver: Decoder,
    ids: TokenIds,
    continuation: TokenIds,
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


class _AttentionBehind:
    """Causal attention of a text behind entries that the receiver has, which keeps the text's own.

    Args:
        before: entries from position 0 on; None for none.
    """

    def __init__(self, before: ChunkEntries | None) -> None:
        self._before = before
        self.start = 0 if before is None else before.start + before.num_tokens
        self.computed = dict[int, tuple[Tensor, Tensor]]()  # keys and values by layer

    def attend(self, inputs: AttentionInputs) -> Queries:
        keys, values, count = inputs.keys, inputs.values, inputs.keys.shape[1]
        self.computed[inputs.layer] = keys.clone(), values.clone()
        positions = torch.arange(self.start, self.start + count, device=keys.device)
        queries, scaling = inputs.queries_at(positions), inputs.scaling
        outs = [causal_attention(queries, keys, values, scaling, (count,), softcap=inputs.softcap)]
        if self._before is not None:
            sides = self._before.keys[inputs.layer], self._before.values[inputs.layer]
            visible = keys.new_ones(count, self._before.num_tokens, dtype=torch.bool)
            outs.append(masked_attention(queries, *sides, scaling, visible, inputs.softcap))
        return inputs.output(merge_attention(*zip(*outs, strict=True)))


class _LayerArguments(Exception):  # noqa: N818, no error
    """Control flow: the arguments that the model hands to its layers are known."""


def _run_layers(
    decoder: Decoder,
    ids: TokenIds,
    states: Float[Tensor, "1 N hidden"] | None,
    layers: LayerRange,
    attention: _AttentionBehind,
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

    modules, spec = decoder.body.layers, decoder.spec
    hook = modules[0].register_forward_pre_hook(take, with_kwargs=True)
    positions = torch.arange(attention.start, attention.start + len(ids), device=spec.device)
    with decoder.attention:
        with forward_hooks([hook]):
            try:
                behind = RenumberedAttention(attention, spec)
                call_uncached(decoder.body, ids, behind, positions)
            except _LayerArguments:
                pass
        embedded = given.pop("hidden_states")
        states = embedded if states is None else states.to(embedded)
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
    decoder: Decoder, cache: SequenceCache, ids: TokenIds
) -> Float[Tensor, "N V"]:
    segment = BatchSegment(cache, ids)
    return decoder.forward_logits([segment], Mode.SCRATCH, range(len(ids))).double().log_softmax(-1)
