"""Recomputation of keys and values from the residual stream.

Qasim et al., "The Residual Stream Is All You Need: On the Redundancy of the KV Cache in
Transformer Inference" (2026), arXiv:2603.19664: keys and values of a layer are its norm,
projections and rotation applied to the residual stream before it, so a cache of that stream can
replace them. Two methods, which the paper's abstract does not distinguish:

project    A residual per token and layer. Each layer's keys and values follow from its own
           residual, without any attention, in any order, of any tokens: `KVRecompute.project`.
reread     One residual per token, before one layer. Later layers follow only by running the model
           from there over all tokens in order, attention included. The paper's 5 KB per token are
           these; before layer 0 they follow from the token id, which takes 4 bytes. Tokens are
           re-read within a forward batch, by `larder.models.recompute_hooks`.

To project, the model itself runs with its other layers replaced, so that a layer gets the same
arguments as ever (positions, rotations, kinds of attention). Its keys and values are captured where
it calls attention, and it is stopped there. So queries are computed, too, and discarded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.cache.sequence import SequenceCache
from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, AttentionProbe
from larder.models.attention_survey import SURVEY_TOKENS
from larder.models.batch_segment import BatchSegment
from larder.models.introspection import TOLERANCE
from larder.models.observers import LayerActivations, Observer

# Reads segments into their caches without logits, as `larder.models.decoder.Decoder.read` does.
SegmentReader = Callable[[Sequence[BatchSegment], Mode, Observer | None], object]


class KVRecompute:
    """Recomputation with the layers of a decoder, which it does not change.

    Args:
        body: model of transformers without its head.
        spec: specification of the decoder's caches.
        read: reads segments through that model.
        attention: context in which the model has Larder's attention.

    Raises:
        ModelError: a layer's keys or values do not follow from what enters it and positions alone.
    """

    def __init__(
        self,
        body: Any,
        spec: ModelSpec,
        read: SegmentReader,
        attention: AbstractContextManager[None],
    ) -> None:
        self.spec, self._attention = spec, attention
        self._body, self._read = body, read
        self._stack = BaseModelLayers(body, len(spec.layers))
        self._probed = self._stack.with_visits(
            {index: partial(_capture_layer, index) for index in range(len(spec.layers))}
        )
        self._check()

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of the decoder, in order."""
        return self._stack.layers

    def read(
        self, row: BatchSegment, residuals: ResidualStream, observer: Observer | None = None
    ) -> None:
        """Append a segment to its cache, and record its residuals before the layers named."""
        with residuals.recording(self._stack.layers):
            self._read([row], Mode.APPEND, observer)

    @torch.no_grad()
    def project(
        self, residuals: Mapping[int, Float[Tensor, "S hidden"]], positions: Positions
    ) -> dict[int, tuple[Keys, Values]]:
        """Keys and values of some layers, each from its own residuals of the same tokens.

        Args:
            residuals: by layer index.
            positions: true positions of the tokens.
        """
        probe = _KVProbe(residuals)
        like = next(iter(residuals.values()))
        with self._attention:
            self._probed(
                inputs_embeds=like[None],
                position_ids=positions[None],
                use_cache=False,
                larder=probe,
            )
        return probe.found

    def _check(self) -> None:
        """Check that a short text's keys and values can be recomputed, for every architecture."""
        spec = self.spec
        seen: dict[int, LayerActivations] = {}

        def watch(row: int, layer: int, recorded: LayerActivations) -> None:
            seen[layer] = recorded

        count = min(SURVEY_TOKENS, len(self._body.get_input_embeddings().weight))
        residuals = ResidualStream(range(len(spec.layers)))
        self.read(BatchSegment(SequenceCache(spec, "dense"), tuple(range(count))), residuals, watch)
        recorded = {layer: residuals.before(layer) for layer in residuals.layers}
        found = self.project(recorded, seen[0].positions)
        for layer, original in seen.items():
            for got, side in zip(found[layer], (original.keys, original.values), strict=True):
                error = float((got - side).abs().max() / side.abs().max().clamp_min(1e-6))
                if not error <= TOLERANCE[spec.dtype]:
                    raise ModelError(
                        f"Layer {layer} of {type(self._body).__name__} gives other keys "
                        f"or values for the same input (difference {error:.2g} of the largest): "
                        "they cannot be recomputed, choose a policy without recompute()."
                    )


class _LayerStopped(Exception):
    """Control flow: a layer has called attention, the rest of it is skipped."""


class _KVProbe:
    """Layer attention that records keys and values computed from residuals, and stops the layer."""

    def __init__(self, residuals: Mapping[int, Float[Tensor, "S hidden"]]) -> None:
        self.residuals = residuals
        self.found: dict[int, tuple[Keys, Values]] = {}

    def attend(self, inputs: AttentionInputs) -> Queries:
        self.found[inputs.layer] = inputs.keys, inputs.values
        raise _LayerStopped


def _capture_layer(
    index: int, layer: nn.Module, args: Sequence[Any], options: dict[str, Any]
) -> None:
    probe: _KVProbe = options["larder"]
    if index in probe.residuals:
        try:
            layer(probe.residuals[index][None], *args, **options)
        except _LayerStopped:
            return


# Replacement of a layer's forward: called with the layer and its arguments.
LayerVisit = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class BaseModelLayers:
    """Layers of a base model, in order, replaceable in a copy of the model.

    Raises:
        ModelError: there is not exactly one module list of the model's number of layers.
    """

    def __init__(self, base: Any, count: int) -> None:
        lists = [
            (path, list(module))
            for path, module in base.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if len(lists) != 1:
            raise ModelError(
                f"{type(base).__name__} has {len(lists)} lists of {count} modules, where one list "
                "of layers is needed: choose a policy without recompute()."
            )
        self._base = base
        self._path, self.layers = lists[0]
        self._wraps = self._returns_tuple()

    def with_visits(self, visits: Mapping[int, LayerVisit]) -> Any:
        """Copy of the model in which some layers call a visit and return their input."""
        layers = [
            self._replacement(index, visits[index]) if index in visits else layer
            for index, layer in enumerate(self.layers)
        ]
        return _replace_module(self._base, self._path, nn.ModuleList(layers))

    def _replacement(self, index: int, visit: LayerVisit) -> nn.Module:
        """Copy of a layer with another forward; models read attributes of their layers."""
        layer = copy.copy(self.layers[index])
        layer.__dict__["forward"] = partial(
            _run_visit, self.layers[index], visit, self._wraps[index]
        )
        return layer

    @torch.no_grad()
    def _returns_tuple(self) -> list[bool]:
        """True for each layer that returns a tuple, as in older transformers."""
        flags: list[bool] = []

        def record(module: nn.Module, args: Any, output: Any) -> None:
            flags.append(isinstance(output, tuple))

        with forward_hooks(layer.register_forward_hook(record) for layer in self.layers):
            zero = torch.zeros(1, 1, dtype=torch.int64, device=self._base.device)
            probe = AttentionProbe()
            self._base(input_ids=zero, position_ids=zero, use_cache=False, larder=probe)
        return flags


def _run_visit(
    layer: nn.Module,
    visit: LayerVisit,
    wraps: bool,
    hidden_states: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    visit(layer, rest, options)
    return (hidden_states,) if wraps else hidden_states


def _replace_module(module: nn.Module, path: str, replacement: nn.Module) -> Any:
    """Copy of a module with another submodule at a path."""
    clone = copy.copy(module)
    clone.__dict__.pop("forward", None)  # a wrapper would call the module it wraps
    clone._modules = dict(module._modules)
    first, _, rest = path.partition(".")
    clone._modules[first] = (
        _replace_module(module.get_submodule(first), rest, replacement) if rest else replacement
    )
    return clone


class ResidualStream:
    """Recorded residual stream before some layers, token by token; it owns its tensors.

    Args:
        layers: indices of the layers.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._blocks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def before(self, layer: int) -> Float[Tensor, "S hidden"]:
        """Residuals of all tokens before one layer, in order; empty if none was recorded."""
        blocks = self._blocks[layer]
        if len(blocks) > 1:
            blocks[:] = [torch.cat(blocks)]
        return blocks[0] if blocks else torch.empty(0, 0)

    @contextmanager
    def recording(self, layers: list[nn.Module]) -> Iterator[None]:
        """Context manager that records the inputs of layers; a block that fails adds nothing.

        Args:
            layers: all layers of the model.
        """
        counts = {layer: len(blocks) for layer, blocks in self._blocks.items()}
        hooks = forward_hooks(
            layers[index].register_forward_pre_hook(self._recorder(index), with_kwargs=True)
            for index in self._blocks
        )
        try:
            with hooks:
                yield
        except BaseException:
            for layer, blocks in self._blocks.items():
                del blocks[counts[layer] :]
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of all recorded residuals."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def _recorder(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            entering = args[0] if args else options["hidden_states"]
            self._blocks[index].append(entering[0].detach().clone())

        return record
