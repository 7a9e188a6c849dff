"""Residual layer: tokens as codes of what a prediction from the layer below leaves (AQUA-KV).

    exact    first and latest tokens: a ragged part
    coded    a residual tier, see `larder.cache.residual_tier`

All heads of all layers hold the same tokens. Once `CODED_TOKENS` of them stand behind the latest
ones, the first layer codes these, and each layer above codes what the layer below it has coded, on
inputs as they will be decoded. A coded token never becomes exact again.

A pass decodes layer by layer: what a layer has decoded is held until the layer above has used it.
A layer that is read alone has the layers below decode first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.entry_columns import check_columns
from larder.cache.forms._composite import MixedLayer
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.predictive import by_head, side_by_side
from larder.cache.residual_tier import AquaPredictions, DecodedTokens, ResidualCoder, ResidualTier
from larder.cache.spec import CacheSpec, LayerOptions, saved_spec_text, text_tensor
from larder.cache.validation import check_kept, check_single_precision, tokens_kept
from larder.core.codec import ResidualSpec
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import LayerPlans, Plan
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.attention import ragged_attention
from larder.ops.packing import starts_of
from larder.ops.vector_quantization import VectorQuantizer

CODED_TOKENS = 64  # fewest tokens that are coded together
SPEC_KEY = "residual"
WAY_OUT = (
    "take a scorer that judges whole tokens, such as sinks_and_window() or novelty(), with "
    "uniform() and drop(), or a storage of single entries, such as quantized()"
)


class ResidualLayer(MixedLayer):
    """Layer whose coded tokens are predicted from the layer below.

    `entries` returns a copy as soon as any token is coded.

    Args:
        index: of the layer among the managed ones.
    """

    supports = frozenset({"ledger", "residual"})
    requires = frozenset({"residual"})
    has_public_name = False
    spans_layers = True

    def __init__(self, layer: LayerSpec, options: LayerOptions, index: int) -> None:
        super().__init__(layer, options)
        spec, device = options.spec.residual, options.device
        assert spec is not None  # required
        self.spec, self.index = spec, index
        predictions = AquaPredictions.load(layer, index, spec.model, device)
        width = layer.kv_heads * layer.head_dim
        bits = spec.bits if index else spec.first_bits
        self._coder = ResidualCoder(predictions, VectorQuantizer(width, bits))
        self._radians = torch.tensor(layer.radians)
        self._below: ResidualLayer | None = None
        self._is_last = True
        self._decoded: DecodedTokens | None = None  # until the layer above has used it
        columns = torch.zeros(len(options.spec.ledger.columns), layer.kv_heads, 0, device=device)
        self._hold(self._coder.nothing(columns))

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> ResidualLayer:
        assert spec.residual is not None  # required
        own = spec.residual.of_model(model.fingerprint)
        index = [each.index for each in model.managed].index(layer.index)
        options = LayerOptions(model.dtype, model.device, replace(spec, residual=own))
        return cls(layer, options, index)

    @classmethod
    def link_layers(cls, layers: Sequence[CacheLayer], spec: CacheSpec) -> None:
        """Link each layer with the one below that it is predicted from."""
        own = [layer for layer in layers if isinstance(layer, ResidualLayer)]
        for below, layer in zip([None, *own], own, strict=False):
            layer._below, layer._is_last = below, layer is own[-1]

    @classmethod
    def fit_plans(cls, layers: Sequence[CacheLayer], plans: Mapping[int, Plan]) -> LayerPlans:
        """Plans, checked to keep the same tokens in all heads of all layers.

        Raises:
            CacheError: they do not.
        """
        first: Tensor | None = None
        for index, plan in plans.items():
            kept = _kept_tokens(plan, layers[index])
            first = kept if first is None else first
            if not torch.equal(kept, first):
                _refuse(f"keeps other tokens in layer {index} than in the layers before")
        return dict(plans)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        super().append(keys, values, positions)
        self._code_oldest(self._ragged.evict if len(positions) == 1 else self._ragged.apply)

    def apply(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.apply)

    def evict(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.evict)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._is_mixed:
            self._ragged.write_columns(columns)
            return
        ledger, order = self._ragged.ledger, self._order()
        heads = self.layer.kv_heads
        check_columns(columns, ledger, heads * len(order))
        held = self._columns()
        for name, numbers in columns.items():
            held[ledger.columns.index(name)][:, order] = numbers.view(heads, -1)
        exact, coded = held.split([len(order) - len(self._tier), len(self._tier)], 2)
        self._ragged.write_packed_columns(exact.flatten(1))
        self._hold(replace(self._tier, columns=coded.clone()))

    def truncate(self, length: int) -> None:
        self._ragged.truncate(length)
        self._hold(self._tier.select((self._tier.positions < length).nonzero().flatten()))

    def drop_range(self, start: int, stop: int) -> None:
        """Drop the tokens at true positions [start, stop), without decoding the others."""
        exact = self._ragged.entries().head_positions(0)
        positions = torch.cat([exact, self._tier.positions])[self._order()]
        stays = (positions < start) | (positions >= stop)
        self.apply(Plan.from_mask(stays.repeat(self.layer.kv_heads), self.lengths))

    def entries(self) -> Entries:
        exact = self._ragged.entries()
        if not self._is_mixed:
            return exact
        order, heads, count = self._order(), self.layer.kv_heads, self.lengths[0]
        numbers = [
            torch.cat([exact.pack(own).unflatten(0, (heads, -1)), coded.to(own.dtype)], 1)
            for own, coded in zip((exact.keys, exact.values), self._by_head(), strict=True)
        ]
        positions = torch.cat([exact.head_positions(0), self._tier.positions])[order]
        marks = torch.arange(count, device=order.device) >= exact.lengths[0]
        columns = self._columns()[:, :, order].flatten(1)
        return Entries(
            numbers[0][:, order].flatten(0, 1),
            numbers[1][:, order].flatten(0, 1),
            positions.repeat(heads),
            tuple(head * count for head in range(heads)),
            self.lengths,
            dict(zip(self._ragged.ledger.columns, columns, strict=True)),
            exact.scalars,
            grades=marks[order].to(torch.int8).repeat(heads),
        )

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes of decoded tokens: of the layer below, of this one, and by head."""
        width = 2 * self.layer.kv_heads * self.layer.head_dim
        return 3 * len(self._tier) * width * torch.float32.itemsize

    def state(self) -> dict[str, Tensor]:
        digest = self._coder.predictions.digest
        text = text_tensor(f"{digest} {self.index} {self.spec.to_text()}")
        coded = {name: tensor.clone() for name, tensor in self._tier.tensors().items()}
        return self._ragged.state() | coded | {SPEC_KEY: text}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> ResidualLayer:
        """Layer restored from `state`, without a layer below; `link_layers` links it.

        Raises:
            CacheError: the predictions are missing, or were trained again.
        """
        saved = saved_spec_text(state, SPEC_KEY, layer, "residual")
        digest, index, text = saved.split(" ", 2)
        spec = CacheSpec("residual", residual=ResidualSpec.from_text(text))
        store = cls(layer, LayerOptions.of_state(state, spec), int(index))
        if store._coder.predictions.digest != digest:
            raise CacheError(
                f"Layer {layer.index} of the saved cache was coded with predictions that have been "
                "trained again since: build the cache again."
            )
        store._adopt_ragged(state)
        store._hold(ResidualTier.of(state))
        return store

    def _like(self) -> ResidualLayer:
        copy = ResidualLayer(self.layer, self.options, self.index)
        copy._coder = self._coder
        copy._hold(self._tier)
        return copy

    def _copy_tensors(self) -> None:
        own = self._tier.tensors().items()
        self._hold(ResidualTier.of({name: tensor.clone() for name, tensor in own}))

    def own_tensors(self) -> tuple[Tensor, ...]:
        held = (*self._tier.tensors().values(), *(self._decoded or ()))
        return tuple(tensor for tensor in held if tensor.numel())

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length + len(self._tier) for length in self._ragged.lengths)

    def decoded(self) -> DecodedTokens:
        """Keys before rotation and values of all coded tokens, from the layers below."""
        if self._decoded is not None:
            return self._decoded
        found = self._coder.decode(self._tier, self._inputs(self._tier.positions))
        if self._below is not None:
            self._below._keep_decoded(None)
        if not self._is_last:
            self._keep_decoded(found)
        return found

    @property
    def _is_mixed(self) -> bool:
        return bool(len(self._tier))

    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        if not self._is_mixed:
            return []
        heads, column = self.layer.kv_heads, self._bias_column
        lengths = torch.full((heads,), len(self._tier))
        sides = (side.flatten(0, 1) for side in self._by_head())
        bias = None if column is None else self._tier.columns[column].flatten()
        layout = starts_of(lengths), lengths, self.layer.scaling
        call = partial(ragged_attention, queries.float(), *sides, *layout, bias)
        return [partial(call, softcap=self.layer.softcap)]

    def _by_head(self) -> tuple[Float[Tensor, "K N D"], Float[Tensor, "K N D"]]:
        """Rotated keys, and values, of the coded tokens."""
        (keys, values), heads = self.decoded(), self.layer.kv_heads
        positions = self._tier.positions.long()
        rotated = by_head(keys, heads, positions, self._radians.to(keys.device))
        return rotated, by_head(values, heads, positions)

    def _inputs(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Decoded keys and values of the layer below at some coded positions."""
        if self._below is None:
            return ()
        theirs = self._below._tier.positions
        rows = torch.searchsorted(theirs, positions.to(theirs)).clamp(max=max(len(theirs) - 1, 0))
        if len(positions) and (not len(theirs) or bool((theirs[rows] != positions).any())):
            raise CacheError(
                f"Layer {self.layer.index} holds coded tokens that the layer below does not hold, "
                "so it cannot be decoded: read the text again into a new cache."
            )
        keys, values = self._below.decoded()
        return (keys, values) if len(rows) == len(theirs) else (keys[rows], values[rows])

    def _code_oldest(self, change: Callable[[Plan], None]) -> None:
        """Code the tokens behind the latest ones, as many as the layer below has coded.

        Args:
            change: removes them from the ragged part.
        """
        exact = self._ragged.entries()
        positions = exact.head_positions(0)
        rows = ((positions >= self.spec.sinks) & (positions < self._limit(positions))).nonzero()
        if len(rows) < (CODED_TOKENS if self._below is None else 1):
            return
        rows, heads = rows.flatten(), self.layer.kv_heads
        own = positions[rows]
        tokens = [
            exact.pack(side).unflatten(0, (heads, -1))[:, rows]
            for side in (exact.keys, exact.values)
        ]
        keys = side_by_side(tokens[0], own.long(), self._radians.to(own.device))
        columns = self._exact_columns()[:, :, rows]
        pair = keys, side_by_side(tokens[1], own)
        added = self._coder.encode(pair, self._inputs(own), own, columns)
        mask = torch.ones(len(positions), dtype=torch.bool)
        mask[rows.cpu()] = False
        change(Plan.from_mask(mask.repeat(heads), exact.lengths))
        self._hold(self._tier.joined(added))
        if self._is_last and self._below is not None:
            self._below._keep_decoded(None)

    def _limit(self, positions: Positions) -> int:
        """Position from which on tokens stay exact."""
        if self._below is None:
            return int(positions[-1]) + 1 - self.spec.recent if len(positions) else 0
        coded = self._below._tier.positions
        return int(coded[-1]) + 1 if len(coded) else 0

    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        rows = _kept_tokens(plan, self)
        indices = self._order().cpu()[rows]
        count = self._ragged.lengths[0]
        exact = torch.zeros(count, dtype=torch.bool)
        exact[indices[indices < count]] = True
        coded = indices[indices >= count] - count
        change(Plan.from_mask(exact.repeat(self.layer.kv_heads), self._ragged.lengths))
        self.replaced_bytes = self._ragged.replaced_bytes
        if len(coded) < len(self._tier):
            self._hold(self._tier.select(coded.to(self._tier.positions.device)))

    def _order(self) -> Int64[Tensor, " T"]:
        """Index of each token, by position, among the exact tokens and then the coded ones."""
        exact = self._ragged.entries().head_positions(0)
        return torch.cat([exact, self._tier.positions]).argsort()

    def _exact_columns(self) -> Float[Tensor, "n K E"]:
        """Ledger columns of the exact tokens."""
        exact, heads = self._ragged.entries(), self.layer.kv_heads
        return exact.packed_columns().unflatten(1, (heads, exact.lengths[0]))

    def _columns(self) -> Float[Tensor, "n K T"]:
        """Ledger columns of the exact tokens, then of the coded ones."""
        return torch.cat([self._exact_columns(), self._tier.columns], 2)

    def _keep_decoded(self, decoded: DecodedTokens | None) -> None:
        self._decoded = decoded
        self._count_bytes()

    def _hold(self, tier: ResidualTier) -> None:
        self._tier = tier
        self._keep_decoded(None)
        self.usage.set_entries(len(tier) * self.layer.kv_heads)


def _kept_tokens(plan: Plan, store: CacheLayer) -> Int64[Tensor, " N"]:
    """Tokens that a plan keeps in every head of a layer. Raises: CacheError: heads differ."""
    check_single_precision(plan)
    check_kept(plan, store.lengths)
    if len(plan.folds) or plan.columns or plan.scalars:
        _refuse("merges entries, or writes columns")
    rows = tokens_kept(plan, store.lengths[0])
    if rows is None:
        _refuse("keeps different tokens in different heads")
    return rows


def _refuse(reason: str) -> NoReturn:
    raise CacheError(
        "aqua() predicts each layer from the layer below, so all heads of all layers hold the same "
        f"tokens, but a plan {reason}: {WAY_OUT}."
    )


Part = ResidualLayer
