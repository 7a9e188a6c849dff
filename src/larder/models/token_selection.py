"""Narrowing of a forward batch: behind some layers, chosen tokens alone go deeper.

Hooks on the model's layers slice the hidden states where a choice was made, and the positions and
rotary embeddings at every later layer, which the model hands to each of them in full. Tokens keep
their true positions; the last one always stays selected, since the next token is predicted from it.
The model itself does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int, Int64
from torch import Tensor, nn

from larder.core.errors import ModelError, UsageError
from larder.core.spec import ModelSpec
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import NO_INPUTS, Decoder, Inputs
from larder.models.forward_batch import ForwardBatch
from larder.models.observers import Observer

# Tokens that go into a layer: called with its index and the true positions of those that came out
# of the layer before; returns ascending indices, the last one among them, or None for all.
ChooseTokens = Callable[[int, Int[Tensor, " Q"]], Int64[Tensor, " N"] | None]

# Arguments of a layer with a row per token, by the dimension of the tokens.
TOKEN_DIMENSIONS: Mapping[str, int] = {"position_ids": -1, "cache_position": -1}
ROTARY = "position_embeddings"  # cosines and sines, a row per token in the last dimension but one


@torch.no_grad()
def read_narrowing(
    decoder: Decoder,
    segment: BatchSegment,
    observer: Observer,
    choose: ChooseTokens,
    inputs: Inputs = NO_INPUTS,
) -> None:
    """Append a segment to its cache in one pass in which chosen tokens alone go deeper.

    Args:
        observer: called behind the attention of each layer, with the tokens that reached it.
        inputs: as in `Decoder.read`.

    Raises:
        UsageError: the model has recurrent layers, or layers that share entries.
        ModelError: the layers of the model are not in one list.
    """
    check_model(decoder.spec)
    narrowing = _NarrowingHooks(choose)
    layers = decoder_layers(decoder.body, len(decoder.spec.layers))
    with (
        forward_hooks(narrowing.install(layers)),
        decoder.append_call([segment], observer, inputs) as call,
    ):
        narrowing.batch = call.batch
        decoder.body(**call.arguments)


def check_model(spec: ModelSpec) -> None:
    """Check that layers of a model can do without some of the tokens.

    Raises:
        UsageError: they cannot.
    """
    if spec.recurrent_bytes:
        raise UsageError(
            "The model has recurrent layers, whose state takes every token of a text, so that no "
            "token can be left out of deeper layers: take whole() or blockwise()."
        )
    shared = [layer for layer in spec.layers if layer.kv_source is not None]
    if shared:
        raise UsageError(
            f"Layer {shared[0].index} of the model attends to the entries of layer "
            f"{shared[0].kv_source}, which hold tokens that would not reach it: take whole() or "
            "blockwise()."
        )


def decoder_layers(body: Any, count: int) -> list[nn.Module]:
    """Layers of a model, in order.

    Args:
        body: model without the head.
        count: number of its layers.

    Raises:
        ModelError: there is not exactly one list of so many modules.
    """
    lists = [
        list(module)
        for module in body.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(lists) != 1:
        raise ModelError(
            f"{type(body).__name__} has {len(lists)} lists of {count} modules, where one list of "
            "layers is needed: take whole() or blockwise()."
        )
    return lists[0]


class _NarrowingHooks:
    """Hooks of one call of a model. Used once."""

    def __init__(self, choose: ChooseTokens) -> None:
        self.batch: ForwardBatch | None = None
        self._choose = choose
        self._rows: Tensor | None = None  # of the selected tokens, among all; None for all

    def install(self, layers: Sequence[nn.Module]) -> Any:
        """Handles of the hooks, as they are installed."""
        for index, layer in enumerate(layers):
            yield layer.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
        def narrow(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            batch = self.batch
            if batch is None or named.get(CONTEXT_KEYWORD) is not batch:
                return None
            rows = self._choose(index, batch.first_positions)
            if rows is not None:
                batch.narrow(rows)
                self._rows = rows if self._rows is None else self._rows[rows]
            if self._rows is None:
                return None
            named = {name: _sliced(name, tensor, self._rows) for name, tensor in named.items()}
            states = args[0] if args else named["hidden_states"]
            states = states if rows is None else states.index_select(1, rows.to(states.device))
            if args:
                return (states, *args[1:]), named
            return args, {**named, "hidden_states": states}

        return narrow


def _sliced(name: str, argument: Any, rows: Tensor) -> Any:
    """Argument of a layer, for some tokens alone where it has a row per token."""
    if name == ROTARY:
        return tuple(tensor.index_select(-2, rows.to(tensor.device)) for tensor in argument)
    if name in TOKEN_DIMENSIONS and argument is not None:
        return argument.index_select(TOKEN_DIMENSIONS[name], rows.to(argument.device))
    return argument
