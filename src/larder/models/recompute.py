"""Keys and values once more, from what entered the layers instead of from storage.

Qasim et al., "The Residual Stream Is All You Need: On the Redundancy of the KV Cache in
Transformer Inference" (2026), arXiv:2603.19664: keys and values of a layer are its own norm,
projections and rotation of the residual stream before it, so whoever holds that stream need not
hold them. Two ways, which the paper's abstract does not keep apart:

project    A residual per token and layer. Each layer's keys and values follow from its own
           residual, without any attention, in any order, of any tokens.
reread     One residual per token, before one layer. Those behind it follow only by running the
           model from there over all tokens in order, attention included. The paper's 5 KB a token
           are these; before layer 0 they follow from the token id, which takes 4 bytes.

Whatever a layer is told beside its input (positions, rotations, kinds of attention) it is told by
the model itself, which runs with its other layers left out; what a layer does with it is caught
where it calls attention, and it is stopped there. So queries are made, too, and thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from larder.cache.sequence import CacheForm, SequenceCache
from larder.core.errors import CacheError, ModelError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values
from larder.models.decoder import SURVEY_TOKENS, Decoder
from larder.models.forward_batch import BatchSegment, LayerActivations, Observer
from larder.models.introspection import KeyProbe
from larder.models.verification import TOLERANCE

BLOCK_TOKENS = 512


class KVRecompute:
    """Rebuilds what a decoder's caches would hold; the decoder is only used, never changed.

    Raises:
        ModelError: a layer's keys or values do not follow from what enters it and positions alone.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._base: Any = decoder.body
        self._stack = LayerStack(self._base, len(decoder.spec.layers))
        self._probed = self._stack.with_visits(
            {index: partial(_capture_layer, index) for index in range(len(decoder.spec.layers))}
        )
        self._check()

    @property
    def spec(self) -> ModelSpec:
        """What the decoder's caches look like."""
        return self._decoder.spec

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's, in order."""
        return self._stack.layers

    def read(
        self, row: BatchSegment, residuals: ResidualStream, observer: Observer | None = None
    ) -> None:
        """Read a row into its cache, and keep what enters the layers that `residuals` names."""
        with residuals.recording(self._stack.layers):
            self._decoder.read([row], Mode.APPEND, observer)

    @torch.no_grad()
    def project(
        self, residuals: Mapping[int, Float[Tensor, "S hidden"]], positions: Positions
    ) -> dict[int, tuple[Keys, Values]]:
        """Keys and values of some layers, each from its own residuals of the same tokens.

        Args:
            residuals: by layer.
            positions: true positions of the tokens.
        """
        probe = _KVProbe(residuals)
        like = next(iter(residuals.values()))
        self._probed(
            inputs_embeds=like[None], position_ids=positions[None], use_cache=False, larder=probe
        )
        return probe.found

    @torch.no_grad()
    def reread(
        self,
        depth: int,
        residuals: Float[Tensor, "S hidden"],
        cache: SequenceCache,
        block: int = BLOCK_TOKENS,
    ) -> None:
        """Run the layers from `depth` on over what entered the first of them, into a cache.

        The cache must hold nothing in those layers, and be given back everything that the first
        reading saw: after an eviction nothing is exact any more. Layers before `depth` are left
        as they are. Equal blocks give equal bits.

        Raises:
            CacheError: the cache already holds something there. One that fails halfway is spoiled.
        """
        if cache.next_position or any(map(sum, cache.lengths()[depth:])):
            raise CacheError(
                f"Layers from {depth} on are to be rebuilt from the first token, but the cache "
                "already holds entries there: take an empty one."
            )
        model = self._stack.with_visits({index: _skip_layer for index in range(depth)})
        try:
            for part in residuals.split(block):
                self._run_on(model, part, cache)
        except BaseException:
            cache.invalidate()
            raise

    def _run_on(self, model: Any, part: Float[Tensor, "Q hidden"], cache: SequenceCache) -> None:
        first = cache.next_position
        positions = torch.arange(first, first + len(part), device=part.device)
        own = _AppendingLayers(cache, positions)
        model(inputs_embeds=part[None], position_ids=positions[None], use_cache=False, larder=own)
        cache.advance(len(part))

    def _check(self) -> None:
        """Believe no architecture: rebuild what a short text gives."""
        spec = self._decoder.spec
        seen: dict[int, LayerActivations] = {}

        def watch(row: int, layer: int, recorded: LayerActivations) -> None:
            seen[layer] = recorded

        count = min(SURVEY_TOKENS, self._decoder.vocab_size)
        residuals = ResidualStream(range(len(spec.layers)))
        self.read(
            BatchSegment(SequenceCache(spec, CacheForm.DENSE), tuple(range(count))),
            residuals,
            watch,
        )
        held = {layer: residuals.before(layer) for layer in residuals.layers}
        found = self.project(held, seen[0].positions)
        for layer, recorded in seen.items():
            for got, own in zip(found[layer], (recorded.keys, recorded.values), strict=True):
                error = float((got - own).abs().max() / own.abs().max().clamp_min(1e-6))
                if not error <= TOLERANCE[spec.dtype]:
                    raise ModelError(
                        f"Layer {layer} of {type(self._decoder.module).__name__} makes other keys "
                        f"or values from the same input (difference {error:.2g} of the largest): "
                        "they cannot be recomputed, hold them instead."
                    )


class _LayerStopped(Exception):
    """A layer has called attention; nothing behind that is wanted."""


class _KVProbe:
    """Stands in for a pass: notes what each layer makes of its own residuals, and stops it."""

    def __init__(self, residuals: Mapping[int, Float[Tensor, "S hidden"]]) -> None:
        self.residuals = residuals
        self.found: dict[int, tuple[Keys, Values]] = {}

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del queries, scaling, sliding_window
        self.found[layer] = keys, values
        raise _LayerStopped


class _AppendingLayers:
    """Stands in for a pass over one cache, some of whose layers may never call."""

    def __init__(self, cache: SequenceCache, positions: Positions) -> None:
        self._cache, self._positions = cache, positions

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del scaling, sliding_window
        told = self._positions, Mode.APPEND, (len(self._positions),)
        return self._cache.attend(layer, queries, keys, values, *told)


def _capture_layer(
    index: int, layer: nn.Module, rest: Sequence[Any], options: dict[str, Any]
) -> None:
    probe: _KVProbe = options["larder"]
    if index in probe.residuals:
        try:
            layer(probe.residuals[index][None], *rest, **options)
        except _LayerStopped:
            return


def _skip_layer(layer: nn.Module, rest: Sequence[Any], options: dict[str, Any]) -> None:
    """Leave a layer out."""


# What a copy does instead of a layer: given the layer and the words it was called with.
LayerVisit = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class LayerStack:
    """The layers of a model without its head, in order.

    Raises:
        ModelError: there is no one list of as many modules as the model has layers.
    """

    def __init__(self, base: Any, count: int) -> None:
        lists = [
            (path, list(module))
            for path, module in base.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if len(lists) != 1:
            raise ModelError(
                f"{type(base).__name__} has {len(lists)} lists of {count} modules, so that its "
                "layers cannot be told: nothing can be recomputed with it."
            )
        self._base = base
        self._path, self.layers = lists[0]
        self._wraps = self._answers()

    def with_visits(self, visits: Mapping[int, LayerVisit]) -> Any:
        """The model with some layers visited instead of passed: each hands on what it is given."""
        layers = [
            self._stand_in(index, visits[index]) if index in visits else layer
            for index, layer in enumerate(self.layers)
        ]
        return _replace_module(self._base, self._path, nn.ModuleList(layers))

    def _stand_in(self, index: int, visit: LayerVisit) -> nn.Module:
        """A copy of a layer, because models read attributes of theirs."""
        stand = copy.copy(self.layers[index])
        stand.__dict__["forward"] = partial(
            _run_visit, self.layers[index], visit, self._wraps[index]
        )
        return stand

    @torch.no_grad()
    def _answers(self) -> list[bool]:
        """Whether each layer answers with a tuple, as those of older transformers do."""
        found: list[bool] = []

        def note(module: nn.Module, args: Any, answer: Any) -> None:
            del module, args
            found.append(isinstance(answer, tuple))

        handles = [layer.register_forward_hook(note) for layer in self.layers]
        try:
            place = torch.zeros(1, 1, dtype=torch.int64, device=self._base.device)
            self._base(input_ids=place, position_ids=place, use_cache=False, larder=KeyProbe())
        finally:
            for handle in handles:
                handle.remove()
        return found


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


def _replace_module(module: nn.Module, path: str, stand: nn.Module) -> Any:
    """A copy of a module with another one at a path below it."""
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)  # a wrapper would call the module it wraps
    twin._modules = dict(module._modules)
    first, _, rest = path.partition(".")
    twin._modules[first] = (
        _replace_module(module.get_submodule(first), rest, stand) if rest else stand
    )
    return twin


class ResidualStream:
    """The residual stream before some layers, token by token; it owns what it holds.

    Args:
        layers: before which.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._blocks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def before(self, layer: int) -> Float[Tensor, "S hidden"]:
        """All tokens before one layer, in order; nothing where none was read."""
        blocks = self._blocks[layer]
        if len(blocks) > 1:
            blocks[:] = [torch.cat(blocks)]
        return blocks[0] if blocks else torch.empty(0, 0)

    @contextmanager
    def recording(self, layers: list[nn.Module]) -> Iterator[None]:
        """Take what enters while the block runs; a block that fails leaves nothing.

        Args:
            layers: all of the model's.
        """
        counts = {layer: len(blocks) for layer, blocks in self._blocks.items()}
        handles = [
            layers[index].register_forward_pre_hook(self._taker(index), with_kwargs=True)
            for index in self._blocks
        ]
        try:
            yield
        except BaseException:
            for layer, blocks in self._blocks.items():
                del blocks[counts[layer] :]
            raise
        finally:
            for handle in handles:
                handle.remove()

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def _taker(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def take(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            del module
            entering = args[0] if args else options["hidden_states"]
            self._blocks[index].append(entering[0].detach().clone())

        return take
