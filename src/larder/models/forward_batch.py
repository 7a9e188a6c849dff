"""Forward batch: packed token segments, each over a cache of its own.

A batch is packed, not padded: segments lie end to end along Q, and every token carries its true
position. Segments do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.cache.forms.base import CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.recurrent_state import NO_STATE, RecurrentState
from larder.core.errors import ModelError
from larder.core.types import Keys, Mode, Queries, Values
from larder.models.attention_backend import AttentionInputs, SteppedSegments
from larder.models.batch_segment import BatchSegment, PassTables
from larder.models.call_interruption import BeforeLayer, no_calls
from larder.models.observers import LayerActivations, Observer
from larder.models.step_layouts import StepLayouts
from larder.ops.attention import apply_sinks, sink_logits
from larder.ops.block_attention import FEWEST_QUERIES
from larder.ops.cpu.decode_attention import StepStorage, StepTable, supports_step
from larder.ops.cpu.segment_attention import StepWork
from larder.ops.packing import device_tensor
from larder.policy.providers.base import ImageProvider, column_providers

if TYPE_CHECKING:
    from larder.models.batch_segment import BlockSegments
    from larder.models.paged_steps import PagedSteps


class ForwardBatch:
    """State of one forward call over packed segments. Used once.

    Args:
        mode: of the entries that the call makes: appended, scratch or probe.
        device: of the packed ids and positions; layers may be on others.
        observer: called with what each layer got of each segment; None for none.
    """

    def __init__(
        self,
        segments: Sequence[BatchSegment],
        mode: Mode,
        device: torch.device,
        observer: Observer | None,
    ) -> None:
        self.segments = segments
        self.called: set[int] = set()
        # What activation providers captured of all tokens before the current attention, by name.
        self.captured: dict[str, Float[Tensor, "Q *rest"]] = {}
        # Further keyword arguments of the model.
        self.options: dict[str, Any] = {}
        self.before_layer: BeforeLayer = no_calls
        # Packed tokens whose states behind the last layer are asked for; None for all.
        self.output_rows: Int[Tensor, " N"] | None = None
        self.mode = mode
        self._spec = segments[0].cache.spec
        self._observer = observer
        # Activations of layers whose entries later layers still read, by segment and layer.
        self._waiting: dict[tuple[int, int], LayerActivations] = {}
        self._plans = [segment.cache.plans for segment in segments]
        self._all_positions = [segment.all_positions() for segment in segments]
        # Tokens of each segment that the present layers take.
        self.widths = [segment.num_tokens for segment in segments]
        packed = device_tensor(list(chain.from_iterable(self._all_positions)), device)
        # True positions of each segment's tokens, by the device of the layers that take them.
        self._positions = {device: list(packed.split(self.widths))}
        self._device = device
        self._firsts = [0, *accumulate(self.widths)]  # index of each segment's first token
        is_append = mode is Mode.APPEND
        # Segments that append one token.
        self._steps = [n for n, width in enumerate(self.widths) if is_append and width == 1]
        # Storages of layers to which segments have not attended yet.
        self._storages: dict[int, list[StepStorage | None]] = {}
        self._layouts: StepLayouts | None = None
        self._pass: PassTables | None = None  # storages of all layers, for one call in each
        self._paged = self._steps_over_pages()
        for segment in segments:
            for tier in segment.cache.tiers:
                tier.expect(segment.append_kind)

    def _steps_over_pages(self) -> PagedSteps | None:
        """Decode steps over pages; None, without their modules, where the model has no arena."""
        if all(segment.cache.spec.arena is None for segment in self.segments):
            return None
        from larder.models.paged_steps import PagedSteps

        return PagedSteps([each.cache for each in self.segments], self._steps, self._firsts)

    def ids(self) -> list[int]:
        """Tokens that the model computes, packed."""
        return [token for each in self.segments for token in (*each.reread_ids, *each.ids)]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes."""
        return sum(segment.num_tokens for segment in self.segments)

    def positions(self) -> Int[Tensor, "*axes 1 Q"]:
        """`position_ids` of all tokens: true positions, or those of A axes in a cache with such."""
        if all(segment.cache.model_positions.are_true for segment in self.segments):
            return torch.cat(self._positions[self._device])[None]
        parts = [self._model_positions(index) for index in range(len(self.segments))]
        axes = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(axes, -1) for part in parts], 1)[:, None]

    def _model_positions(self, index: int) -> Int[Tensor, "A Q"]:
        own_positions, segment = self._positions[self._device][index], self.segments[index]
        # Those of a text are known before it is appended.
        known = segment.cache.model_positions
        length = known.known.shape[1] if self.mode is Mode.APPEND else segment.cache.next_position
        return known.at(own_positions, length)

    @property
    def first_positions(self) -> Int[Tensor, " Q"]:
        """True positions of the tokens of the first segment."""
        return self._positions[self._device][0]

    def _positions_on(self, device: torch.device) -> list[Int[Tensor, " Q"]]:
        """True positions of the tokens of each segment on the device of a layer."""
        if device not in self._positions:
            self._positions[device] = [
                own_positions.to(device) for own_positions in self._positions[self._device]
            ]
        return self._positions[device]

    @property
    def is_narrowed(self) -> bool:
        """True if tokens were left behind in an earlier layer."""
        return sum(self.widths) < self.num_tokens

    def prepare(self) -> None:
        """Reserve the pages of decode steps, for all layers.

        Raises:
            CacheError: none are left.
        """
        if self._paged is not None:
            self._paged.prepare(self._all_positions, self._observer)

    @property
    def is_paged(self) -> bool:
        """True if all tokens are decode steps over pages, of a model with attention alone."""
        count = 0 if self._paged is None else self._paged.segment_count
        return count == len(self.segments) and not self._spec.recurrent

    def narrow(self, rows: Int64[Tensor, " N"]) -> None:
        """Continue with some tokens of the only segment: later layers get these alone.

        Args:
            rows: ascending indices into its present tokens, the last one among them.
        """
        [own_positions] = self._positions[self._device]
        own_positions = own_positions[rows.to(self._device)]
        self._positions = {self._device: [own_positions]}
        self._all_positions, self.widths = [own_positions.tolist()], [len(rows)]
        self._firsts = [0, len(rows)]

    def attend(self, inputs: AttentionInputs) -> Queries:
        """Append the tokens of all segments to a layer, attend, and report the layer.

        Decode steps and blocks attend in a call together where their storage allows it, all other
        segments one by one.
        """
        self.before_layer()
        layer = self._spec.index_of(inputs.layer)
        self.called.add(layer)
        queries = inputs.queries
        if inputs.temperature is not None:
            queries = inputs.queries_at(torch.cat(self._positions_on(queries.device)))
        sides = queries, inputs.keys, inputs.values
        if self._pass is not None:
            return self._pass.attend(self._spec.layers[layer], sides)
        blocks = self._block_segments(layer, *sides)
        stepped = self._attend_together(layer, sides, blocks)
        if stepped is not None and len(stepped.segments) == len(self.segments):
            self._observe_all(layer, *sides)
            return stepped.out
        done = {} if stepped is None else stepped.by_segment()
        return self._attend_rest(layer, sides, blocks, done)

    def start_pass(self, dtype: torch.dtype) -> None:
        """Attend by one call in each layer, where all caches have tables for it.

        For a caller that passes all tokens through every layer, without gradients.

        Args:
            dtype: of keys and values.
        """
        is_observed = self._observer is not None or bool(self.captured)
        if self.mode is Mode.APPEND and not is_observed and self._paged is None:
            self._pass = PassTables.of(self.segments, dtype)

    def _attend_together(
        self, layer: int, sides: tuple[Queries, Keys, Values], blocks: BlockSegments | None
    ) -> SteppedSegments | None:
        """Attention of decode steps, over pages or plain storage; blocks attend beside them."""
        stepped = None if self._paged is None else self._paged.attend(layer, *sides)
        if stepped is None:
            return self._attend_steps(layer, sides, blocks)
        if blocks is not None:
            blocks.attend(None)
        return stepped

    def _attend_rest(
        self,
        layer: int,
        sides: tuple[Queries, Keys, Values],
        blocks: BlockSegments | None,
        done: Mapping[int, Tensor],
    ) -> Queries:
        """Packed output of all segments; those that are not done yet attend one by one.

        Args:
            done: outputs by segment.
        """
        outs: list[Queries] = []
        parts = (side.split(self.widths, 1) for side in sides)
        for index, inputs_of_layer in enumerate(zip(*parts, strict=True)):
            out = done.get(index)
            if out is None and blocks is not None:
                out = blocks.output(index)
            if out is None:
                segment, new = self.segments[index], self._new_tokens(index, *inputs_of_layer)
                out = segment.cache.attend(layer, new, len(segment.reread_ids))
            outs.append(out)
            self._observe(index, layer, *inputs_of_layer)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _block_segments(self, layer: int, *sides: Tensor) -> BlockSegments | None:
        """Segments that read a block beside others; None where there are none."""
        if len(self.widths) == 1 or max(self.widths) < FEWEST_QUERIES or self.mode is Mode.PROBE:
            return None
        from larder.models.batch_segment import BlockSegments  # not before it is needed

        parts = zip(*(side.split(self.widths, 1) for side in sides), strict=True)
        new = [self._new_tokens(index, *own) for index, own in enumerate(parts)]
        return BlockSegments.of(layer, self.segments, new)

    def _new_tokens(self, index: int, queries: Queries, keys: Keys, values: Values) -> NewTokens:
        """Tokens of one segment, as its cache takes them."""
        segment = self.segments[index]
        return NewTokens(
            queries,
            keys,
            values,
            self._positions_on(queries.device)[index],
            self.mode,
            segment.sections,
            segment.shift,
            segment.images.bidirectional,
        )

    def _step_layers(self, layer: int) -> list[CacheLayer]:
        """Layer of the caches of all segments that append one token."""
        return [self.segments[index].cache.step_layer(layer) for index in self._steps]

    def _step_storages(self, layer: int) -> list[StepStorage | None]:
        """Storage of a layer of each segment that appends one token; made once per layer, as it may
        record logits."""
        found = self._storages.pop(layer, None)
        return [own.step_storage() for own in self._step_layers(layer)] if found is None else found

    def step_tables(
        self, dtype: torch.dtype
    ) -> Callable[[Float[Tensor, "L K N D"], Float[Tensor, "L K N D"]], StepTable] | None:
        """Maker of the table of all layers' storages, given new keys and values.

        None where layers attend one by one: where a segment does not append one token, or is not
        stored plainly in that dtype. A caller that appends calls `finish_steps` next.
        """
        is_alone = len(self._steps) < len(self.segments) or self._paged is not None
        if is_alone or self._spec.last_readers:
            return None
        self._layouts = StepLayouts.of([segment.cache for segment in self.segments], dtype)
        if self._layouts is not None:
            rows = self._layouts.take_rows()
            evictions = self._layouts.plan_evictions(self._observer)
            return partial(StepTable.of_rows, rows, self.step_positions, evictions)
        storages = self._all_storages(dtype)
        if storages is None:
            return None
        return partial(StepTable.of_layers, storages, self.step_positions)

    def _all_storages(self, dtype: torch.dtype) -> list[list[StepStorage]] | None:
        """Storages of all layers, by layer and segment; None if there is one of another type."""
        whole = list[list[StepStorage]]()
        for layer in range(len(self._spec.layers)):
            found = self._step_storages(layer)
            self._storages[layer] = found
            plain = [
                storage for storage in found if storage is not None and storage.keys.dtype is dtype
            ]
            if len(plain) < len(found):
                return None
            whole.append(plain)
        return whole

    @property
    def step_positions(self) -> list[int]:
        """True positions of the tokens of all segments that append one."""
        return [self._all_positions[index][0] for index in self._steps]

    def finish_steps(self, layers: Sequence[tuple[Queries, Keys, Values]]) -> None:
        """Count the tokens that were appended by `step_tables`, and report every layer.

        Args:
            layers: queries, keys and values of each layer.
        """
        self._storages.clear()
        self.called.update(range(len(layers)))
        if self._layouts is not None:
            is_done = self._layouts.finish(self._observer)
            if is_done or (self._observer is None and not self.captured):
                return
        positions = self.step_positions
        for layer, sides in enumerate(layers):
            if self._layouts is None:
                for own, position in zip(self._step_layers(layer), positions, strict=True):
                    own.count_step(position)
            self._observe_all(layer, *sides)

    def _attend_steps(
        self, layer: int, sides: tuple[Queries, Keys, Values], blocks: BlockSegments | None
    ) -> SteppedSegments | None:
        """Attention of all segments that append one token to plain storage, with that of blocks."""
        queries, keys, values = sides
        found = list[tuple[int, StepStorage]]()
        if self._steps and supports_step(queries, keys, values):
            storages = enumerate(self._step_storages(layer))
            found = [(n, own) for n, own in storages if own and own.keys.dtype is keys.dtype]
        if not found:
            if blocks is not None:
                blocks.attend(None)
            return None
        layers = self._step_layers(layer)
        segments = [self._steps[n] for n, _ in found]
        spec = layers[0].layer
        if len(segments) < queries.shape[1]:
            columns = torch.tensor([self._firsts[index] for index in segments])
            queries, keys, values = (side[:, columns] for side in sides)
        positions = [self._all_positions[index][0] for index in segments]
        storages = [own for _, own in found]
        work = StepWork(queries, keys, values, positions, storages, spec.scaling)
        if blocks is None:
            work.run()
        else:
            blocks.attend(work)
        out, lse = work.state
        for (n, _), position in zip(found, positions, strict=True):
            layers[n].count_step(position)
        if spec.sinks:
            sinks = sink_logits(spec, out)
            tokens = zip(out.split(1, 1), lse.split(1, 1), strict=True)
            # One by one: torch rounds a number of a vector by its index there.
            out = torch.cat([apply_sinks(*token, sinks) for token in tokens], 1)
        return SteppedSegments(segments, out.to(queries.dtype))

    def _observe_all(self, layer: int, queries: Queries, keys: Keys, values: Values) -> None:
        """Report a layer of every segment, if there is an observer or a later reader."""
        if self._observer is None and not self.captured and not self._spec.last_readers:
            return
        if len(self.segments) == 1:
            return self._observe(0, layer, queries, keys, values)
        sides = (side.split(self.widths, 1) for side in (queries, keys, values))
        for index, (own, new_keys, new_values) in enumerate(zip(*sides, strict=True)):
            self._observe(index, layer, own, new_keys, new_values)

    def finish(self, recurrent: Sequence[RecurrentState] = ()) -> None:
        """Advance the caches by the appended tokens.

        Args:
            recurrent: states of layers without attention by segment; none in most models.

        Raises:
            ModelError: a layer of the model never called attention.
        """
        missed = {layer.index for layer in self._spec.layers} - self.called
        if missed:
            raise ModelError(f"Layers {sorted(missed)} never called attention in this batch.")
        if self._layouts is not None:
            self._layouts.end_step()
        if self._pass is not None:
            self._pass.finish()
        if self._paged is not None:
            self._paged.evict()
        if self.mode is Mode.APPEND:
            states = recurrent or [NO_STATE] * len(self.segments)
            for segment, state in zip(self.segments, states, strict=True):
                segment.cache.advance(len(segment.ids), state)

    def roll_back(self) -> None:
        """Remove the entries that a failed forward appended.

        Evictions of a step's kernels are undone. A cache that executed a plan in the meantime
        cannot be rolled back, and is invalidated.
        """
        if self._layouts is not None:
            self._layouts.undo_evictions(self._plans)
        for segment, plans in zip(self.segments, self._plans, strict=True):
            if segment.cache.plans != plans:
                segment.cache.invalidate()
            elif self.mode is Mode.APPEND:
                segment.cache.truncate(segment.cache.next_position)

    def _observe(
        self, index: int, layer: int, queries: Queries, keys: Keys, values: Values
    ) -> None:
        """Report a layer of a segment, or hold it back until the last reader has attended."""
        segment, positions = self.segments[index], self._positions_on(keys.device)[index]
        spec, old = segment.cache.spec, len(segment.reread_ids)
        if old:
            queries, keys, values = queries[:, old:], keys[:, old:], values[:, old:]
            positions = positions[old:]
        sides = queries, keys, values
        seen = LayerActivations(*sides, positions, self._inputs(index))
        if layer in spec.last_readers.values():
            self._waiting[index, layer] = seen
        else:
            self._report(index, layer, seen)
        if (source := spec.last_readers.get(layer)) is not None:
            self._report(index, source, self._waiting.pop((index, source)))

    def _report(self, index: int, layer: int, activations: LayerActivations) -> None:
        """Record what was captured of a segment's new tokens, and call the observer."""
        segment = self.segments[index]
        cache, count = segment.cache, len(segment.ids)
        if activations.inputs and self.mode is Mode.APPEND:
            start, inputs = cache.next_position, activations.inputs
            if len(activations.positions) < count:
                own_positions = activations.positions - start
                inputs = {
                    name: _spread(tensor, own_positions, count) for name, tensor in inputs.items()
                }
            cache.write_token_columns(layer, inputs, start)
        if self._observer is not None:
            self._observer(index, layer, activations)

    def _inputs(self, index: int) -> dict[str, Tensor]:
        """Captured inputs of the new tokens of one segment, and those of its images."""
        inputs = _image_inputs(self.segments[index], self._device)
        if not self.captured:
            return inputs
        first, stop = self._firsts[index : index + 2]
        rows = slice(first + len(self.segments[index].reread_ids), stop)
        return inputs | {name: captured[rows] for name, captured in self.captured.items()}


def _spread(
    own: Float[Tensor, "N *rest"], own_positions: Int[Tensor, " N"], count: int
) -> Float[Tensor, "Q *rest"]:
    """Values of some of `count` consecutive tokens, with zeros for the others."""
    return own.new_zeros(count, *own.shape[1:]).index_copy(0, own_positions.long(), own)


def _image_inputs(segment: BatchSegment, device: torch.device) -> dict[str, Tensor]:
    """Values of image providers that a cache has columns for, of a segment's tokens."""
    if not segment.images.spans:
        return {}
    is_image = segment.images.mask(len(segment.ids)).to(device)
    providers = column_providers(segment.cache.cache_spec.ledger.columns, ImageProvider)
    return {name: provider.measure(is_image) for name, provider in providers.items()}
