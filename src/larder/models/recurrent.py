"""Recurrent layers of hybrid models (Mamba, linear attention): their states in a forward batch.

State-space, linear-attention and convolution layers read their state from `past_key_values`,
through the methods of transformers' `Cache`. A forward batch gives the model a `RecurrentCache`,
which holds the states of some texts at a time, and hooks on these layers compute the texts of a
packed batch as rows, those of equal length together. No state of a sequence is written before the
batch has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from larder.cache.recurrent_state import RecurrentState
from larder.core.errors import CacheError, ModelError
from larder.core.spec import RecurrentSpec
from larder.core.types import Mode
from larder.models.activation_hooks import forward_hooks, is_numbered
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.batch_segment import BatchSegment
from larder.models.forward_batch import ForwardBatch

CONV, RECURRENT = "conv", "recurrent"  # kinds of tensors, as transformers names them
# Kinds of layers in configurations that have a recurrent state, some beside attention; "mamba" in
# transformers before 5.23 alone.
RECURRENT_KINDS = frozenset({"conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding"})

# Kinds of layers without attention.
OTHER_KINDS = frozenset({"conv", "linear_attention", "mamba", "moe", "mlp"})

# Tensors by layer number in the model and name.
LayerTensors = dict[tuple[int, str], Tensor]


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Kind of each layer as a model's configuration names it; empty where it names none."""
    return tuple(getattr(config.get_text_config(), "layer_types", None) or ())


def recurrent_layers(config: Any) -> dict[int, int]:
    """Number of states of each layer that has a recurrent one, by number of the layer.

    Raises:
        ModelError: no layer has attention, or the installed transformers has no caches for
            recurrent layers.
    """
    kinds = layer_kinds(config)
    if not RECURRENT_KINDS.intersection(kinds):
        return {}
    if OTHER_KINDS.issuperset(kinds):
        raise ModelError(
            f"The model has {len(kinds)} layers and none with attention, whose keys and values "
            "Larder manages: run it in transformers, or choose a model with attention."
        )
    try:
        from transformers.cache_utils import LinearAttentionCacheLayerMixin
    except ImportError as error:
        raise ModelError(
            f"The model has recurrent layers, whose states transformers {transformers.__version__} "
            "does not hold in its caches: install transformers 5.23 or later."
        ) from error
    text = config.get_text_config()

    layers = enumerate(transformers.DynamicCache(config=text).layers)
    return {
        number: layer.number_of_states
        for number, layer in layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    }


class RecurrentCache(Cache):
    """Cache of transformers with the states of recurrent layers alone, a row per text.

    Keys and values pass through it, because attention reads Larder's caches.

    Args:
        counts: number of states by layer, see `recurrent_layers`.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        from transformers.cache_utils import DummyLayer

        super().__init__(layers=[DummyLayer() for _ in range(max(counts) + 1)])
        self._counts = counts

    def load(self, number: int, states: Sequence[RecurrentState]) -> None:
        """Load copies of the tensors of a layer, a row per state; none where the first has none."""
        from transformers.cache_utils import LinearAttentionLayer

        layer = LinearAttentionLayer(number_of_states=self._counts[number])
        for owner, name in states[0].tensors:
            if owner == number:
                _fill(layer, name, torch.stack([state.tensors[owner, name] for state in states]))
        self.layers[number] = layer

    def take(self, number: int) -> list[LayerTensors]:
        """Tensors of a layer by row, after it has computed a text per row."""
        layer: Any = self.layers[number]
        kinds = {CONV: layer.conv_states, RECURRENT: layer.recurrent_states}
        found = {
            (number, f"{kind}.{index}"): tensor
            for kind, tensors in kinds.items()
            for index, tensor in tensors.items()
            if tensor is not None
        }
        rows = range(len(next(iter(found.values()), ())))
        # Clones, because a row outlives the others.
        return [{key: tensor[row].clone() for key, tensor in found.items()} for row in rows]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given to the model."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Size of a mask over the new tokens; none is made."""
        return query_length, 0


def _fill(layer: Any, name: str, tensor: Tensor) -> None:
    """Give a layer of transformers a state, as if it had computed a text."""
    kind, _, index = name.partition(".")
    number = int(index)
    layer.device, layer.dtype = tensor.device, tensor.dtype
    layer.has_previous_state[number] = True
    if kind == CONV:
        layer.conv_states[number], layer.conv_kernel_size[number] = tensor, tensor.shape[-1]
        layer.is_conv_states_initialized[number] = True
    else:
        layer.recurrent_states[number] = tensor
        layer.is_recurrent_states_initialized[number] = True


@dataclass(frozen=True)
class RecurrentModules:
    """Recurrent layers of a model; none of most.

    Args:
        counts: number of states by layer, see `recurrent_layers`.
        modules: the module that computes each layer.
        specs: tensors of their states.
    """

    counts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    modules: Mapping[int, nn.Module] = field(default_factory=lambda: MappingProxyType({}))
    specs: tuple[RecurrentSpec, ...] = ()

    def hooks(self, batch: ForwardBatch) -> RecurrentHooks | NoHooks:
        """Hooks of the model's call for a forward batch."""
        return RecurrentHooks(self, batch) if self.modules else NoHooks()

    def silenced(self) -> AbstractContextManager[None]:
        """Context in which the layers answer with zeros, so that tokens do not see each other."""
        return forward_hooks(
            module.register_forward_hook(_zeros) for module in self.modules.values()
        )


def _zeros(module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor:
    return torch.zeros_like(out)


class NoHooks:
    """Hooks of a call of a model without recurrent layers."""

    def installed(self) -> AbstractContextManager[None]:
        """Context without effect."""
        return nullcontext()

    def states(self) -> list[RecurrentState]:
        """Empty list: there are no recurrent layers."""
        return []


@dataclass(frozen=True)
class PackedText:
    """Tokens [start, stop) of a packed batch, which continue one state."""

    start: int
    stop: int
    state: RecurrentState


def packed_texts(segments: Sequence[BatchSegment]) -> list[PackedText]:
    """Texts of a packed batch: the sections of its segments, each behind the segment's cache.

    Raises:
        CacheError: a text is not behind all tokens of its cache.
    """
    texts, start = list[PackedText](), 0
    for segment in segments:
        if segment.shift < 0 or segment.reread_ids:
            raise CacheError(
                f"A text cannot be read {max(-segment.shift, len(segment.reread_ids))} tokens "
                "before the end of a cache, because recurrent layers hold a state of all its "
                "tokens: give shift=0."
            )
        for length in segment.section_lengths:
            texts.append(PackedText(start, start + length, segment.cache.recurrent))
            start += length
    return texts


def row_groups(texts: Sequence[PackedText]) -> list[list[int]]:
    """Indices of the texts that can be rows of one call: of equal length, all with a state or none.

    The decode steps of a batch are one group.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault((text.stop - text.start, bool(text.state.tensors)), []).append(index)
    return list(groups.values())


class RecurrentHooks:
    """Hooks that compute recurrent layers, group by group of texts.

    The first group is computed by the call that the model makes, the others behind it.
    """

    def __init__(self, layers: RecurrentModules, batch: ForwardBatch) -> None:
        self._layers, self._is_append = layers, batch.mode is Mode.APPEND
        self._cache = RecurrentCache(layers.counts)
        self._texts = packed_texts(batch.segments)
        self._groups = row_groups(self._texts)
        self._after: list[LayerTensors] = [{} for _ in self._texts]
        self._hidden = torch.empty(0)  # input of the layer in progress, all texts
        batch.options["past_key_values"] = self._cache

    def installed(self) -> AbstractContextManager[None]:
        """Context of the model's call."""
        return forward_hooks(self._install())

    def _install(self) -> Iterator[RemovableHandle]:
        for number, module in self._layers.modules.items():
            first, others = partial(self._first, number), partial(self._others, number)
            yield module.register_forward_pre_hook(first, with_kwargs=True)
            yield module.register_forward_hook(others, with_kwargs=True)

    def states(self) -> list[RecurrentState]:
        """State of each segment behind the batch in append mode, else none.

        Raises:
            ModelError: a layer was not called.
        """
        if not self._is_append:
            return []
        missed = self._layers.modules.keys() - {number for number, _ in self._after[0]}
        if missed:
            raise ModelError(f"Recurrent layers {sorted(missed)} computed no state in this batch.")
        return [RecurrentState(tensors) for tensors in self._after]

    def _first(
        self, number: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: the call for the first group."""
        if not self._is_own(args, named):
            return args, named
        self._hidden = args[0] if args else named["hidden_states"]
        kwargs = {name: value for name, value in named.items() if name != CONTEXT_KEYWORD}
        return self._call(number, self._groups[0], args, kwargs)

    def _others(
        self,
        number: int,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        out: Float[Tensor, "G Q hidden"],
    ) -> Float[Tensor, "_ _ hidden"]:
        """Forward hook: the calls for the other groups, and the output for all texts."""
        if not self._is_own(args, named):
            return out
        outs = dict(zip(self._groups[0], out, strict=True))
        self._keep(number, self._groups[0])
        for group in self._groups[1:]:
            own_args, own = self._call(number, group, args, named)
            outs |= zip(group, module.forward(*own_args, **own), strict=True)
            self._keep(number, group)
        return torch.cat([outs[index] for index in range(len(outs))])[None]

    def _is_own(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """True for a call of this batch, and not of one that runs between its layers."""
        return any(each is self._cache for each in (*args, *named.values()))

    def _call(
        self, number: int, group: Sequence[int], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a layer for a group of texts, whose states are loaded."""
        texts = [self._texts[index] for index in group]
        self._cache.load(number, [text.state for text in texts])
        hidden = torch.stack([self._hidden[0, text.start : text.stop] for text in texts])
        if args:
            return (hidden, *args[1:]), dict(named)
        return args, {**named, "hidden_states": hidden}

    def _keep(self, number: int, group: Sequence[int]) -> None:
        """Hold the states of a group behind its texts."""
        for index, tensors in zip(group, self._cache.take(number), strict=True):
            self._after[index] |= tensors


class RecurrentSurvey(RecurrentCache):
    """Records which modules compute recurrent layers, and the tensors of their states."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        super().__init__(counts)
        self._calling, self._modules = nn.Module(), dict[int, nn.Module]()
        for number in counts:
            self.load(number, [RecurrentState()])

    def installed(self, body: Any) -> AbstractContextManager[None]:
        """Context in which the modules that are called are followed."""
        return forward_hooks(
            module.register_forward_pre_hook(self._enter)
            for module in body.modules()
            if is_numbered(module)
        )

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
        self._modules[layer_idx] = self._calling
        return super().update_conv_state(conv_states, layer_idx, *args, **kw)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        self._modules[layer_idx] = self._calling
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kw)

    def modules(self) -> RecurrentModules:
        """Recurrent layers of the model, after one call of it.

        Raises:
            ModelError: a layer did not read or write its state through the cache.
        """
        missed = self._counts.keys() - self._modules.keys()
        if missed:
            raise ModelError(
                f"Layers {sorted(missed)} are recurrent by the configuration, but keep no state in "
                "transformers' cache: Larder cannot continue their texts, choose another model."
            )
        specs = [
            RecurrentSpec(number, name, tuple(tensor.shape), tensor.dtype)
            for number in sorted(self._modules)
            for (_, name), tensor in self.take(number)[0].items()
        ]
        return RecurrentModules(self._counts, self._modules, tuple(specs))

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calling = module
