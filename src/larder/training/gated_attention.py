"""Attention under learned gates that gradients pass through, for methods trained on passages.

A gate gives each token and kv head of a layer a number, from the input of the layer's attention. In
`DecayedAttention` the number says how fast an entry fades (TRIM-KV, global retention gates), in
`MaskedAttention` whether later tokens see it at all (Attention-Gate). With gates that keep all,
both are the model's own attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from larder.core.errors import ModelError
from larder.core.types import Queries
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.ops.attention import cap_logits, masked_attention
from larder.policy.protect import ProtectedTokens
from larder.training.passage_method import differentiable_states

# Numbers of the tokens of a pass, of a layer by its index among the managed ones, from its input.
LayerGate = Callable[[int, Float[Tensor, "Q hidden"]], Float[Tensor, "Q K"]]

KEPT_FROM = 0.5  # least number of a gate that keeps an entry
OWN = ProtectedTokens(0, 1)  # a query's own token


@dataclass(frozen=True)
class GatedLogits:
    """Logits of one layer, and the gates of its entries.

    Args:
        index: of the layer among the managed ones.
        ages: tokens from an entry to a query.
        visible: entries that the model itself lets a query see.
    """

    index: int
    logits: Float[Tensor, "K R Q S"]
    gates: Float[Tensor, "K S"]
    ages: Int[Tensor, "Q S"]
    visible: Bool[Tensor, "Q S"]

    @staticmethod
    def of(inputs: AttentionInputs, index: int, gates: Float[Tensor, "K S"]) -> GatedLogits:
        """Logits of the inputs of a layer."""
        ages = token_ages(inputs)
        visible = visible_tokens(inputs, ages)
        return GatedLogits(index, grouped_logits(inputs), gates, ages, visible)


class GatedAttention(ABC):
    """Causal attention of a pass, changed by gates of the managed layers; base class.

    Args:
        decoder: model whose layers' inputs the gates read.
        gate: the gates.

    Raises:
        ModelError: the model has attention sinks.
    """

    def __init__(self, decoder: Decoder, gate: LayerGate) -> None:
        if any(layer.sinks for layer in decoder.spec.managed):
            raise ModelError(
                "Gates cannot be trained through attention with sink logits: choose another model, "
                "or a policy without gates."
            )
        self._decoder, self._gate = decoder, gate
        self._places = {layer.index: n for n, layer in enumerate(decoder.spec.managed)}
        self._states = dict[int, Tensor]()
        self._plain = CausalAttention(lambda inputs: None)

    def hidden_states(self, ids: Sequence[int]) -> Float[Tensor, "T hidden"]:
        """Hidden states behind the last norm of a pass over some tokens."""
        with layer_inputs(self._decoder, self._record):
            return differentiable_states(self._decoder, ids, self)

    def attend(self, inputs: AttentionInputs) -> Queries:
        """Attention output of one layer, as of `LayerAttention`."""
        index = self._places.get(inputs.layer)
        if index is None:
            return self._plain.attend(inputs)
        gates = self._gate(index, self._states.pop(inputs.layer)).T  # [K, S]
        weights = self.weigh(GatedLogits.of(inputs, index, gates))
        out = weights @ inputs.values.float()[:, None]  # [K, R, Q, D]
        return out.flatten(0, 1).to(inputs.queries.dtype)

    @abstractmethod
    def weigh(self, gated: GatedLogits) -> Float[Tensor, "K R Q S"]:
        """Attention weights."""

    def _record(self, index: int, states: Tensor) -> None:
        self._states[index] = states


class DecayedAttention(GatedAttention):
    """Attention whose logits decay to 0 with age: the logit of an entry times beta^age.

    Bui et al. (2025), arXiv:2512.03324, equation 4; the gates are log beta.

    Attributes:
        held: of each layer, by its index, the sum of beta^age over the entries that a query sees.
    """

    def __init__(self, decoder: Decoder, gate: LayerGate) -> None:
        super().__init__(decoder, gate)
        self.held = dict[int, Float[Tensor, "K Q"]]()

    def weigh(self, gated: GatedLogits) -> Float[Tensor, "K R Q S"]:
        worth = retention(gated.gates, gated.ages) * gated.visible
        self.held[gated.index] = worth.sum(-1)
        logits = gated.logits * worth[:, None]
        return logits.masked_fill_(~gated.visible, -torch.inf).softmax(-1)


class MaskedAttention(GatedAttention):
    """Attention to the entries whose gates are at least 1/2, and to protected ones.

    Zeng et al. (2024), arXiv:2410.12876, where every token sees itself beside what is kept. The
    choice passes gradients on as if it were the gate's own number.

    Args:
        protect: first tokens of a pass, and latest of a query, its own included, that are seen
            whatever their gates.

    Attributes:
        gates: of each layer, by its index.
    """

    def __init__(self, decoder: Decoder, gate: LayerGate, protect: ProtectedTokens = OWN) -> None:
        super().__init__(decoder, gate)
        self._protect = protect
        self.gates = dict[int, Float[Tensor, "K S"]]()

    def weigh(self, gated: GatedLogits) -> Float[Tensor, "K R Q S"]:
        self.gates[gated.index] = gated.gates
        spared = gated.ages < self._protect.last
        spared[:, : self._protect.first] = True
        kept = straight_through(gated.gates)[:, None].masked_fill(spared, 1.0)  # [K, Q, S]
        logits = gated.logits.masked_fill(~gated.visible, -torch.inf)
        weights = logits.softmax(-1) * kept[:, None]
        return weights / weights.sum(-1, keepdim=True)


def retention(log_betas: Float[Tensor, "K S"], ages: Int[Tensor, "Q S"]) -> Float[Tensor, "K Q S"]:
    """beta^age of each entry at each query; 1 where the age is below 0."""
    return (log_betas[:, None] * ages.clamp(min=0)).exp()


def straight_through(gates: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """1 where a gate is at least 1/2 and else 0, with the gradient of the gate itself."""
    return (gates >= KEPT_FROM).float() + (gates - gates.detach())


def attention_under_mask(
    inputs: AttentionInputs,
    queries: Queries,
    keys: Float[Tensor, "K S D"],
    values: Float[Tensor, "K S Dv"],
    seen: Bool[Tensor, "*H Q S"],
) -> Queries:
    """Attention of a layer under a mask, which gradients pass through.

    By torch's kernel, except where the layer has a softcap or attention sinks.
    """
    if inputs.softcap is not None or len(inputs.sinks):
        return inputs.output(
            masked_attention(queries, keys, values, inputs.scaling, seen, inputs.softcap)
        )
    group = len(queries) // len(keys)
    spread = (side.repeat_interleave(group, 0)[None] for side in (keys, values))
    return F.scaled_dot_product_attention(
        queries[None], *spread, attn_mask=seen, scale=inputs.scaling
    )[0]


def token_ages(inputs: AttentionInputs) -> Int[Tensor, "Q S"]:
    """Tokens from each entry of a pass to each query."""
    indices = torch.arange(inputs.queries.shape[1], device=inputs.queries.device)
    return indices[:, None] - indices


def visible_tokens(inputs: AttentionInputs, ages: Int[Tensor, "Q S"]) -> Bool[Tensor, "Q S"]:
    """Entries of a pass that each query of a layer sees: earlier, in its window and its chunk."""
    visible = ages >= 0
    if inputs.sliding_window is not None:
        visible &= ages < inputs.sliding_window
    if inputs.chunk is not None:
        chunks = torch.arange(len(ages), device=ages.device) // inputs.chunk
        visible &= chunks[:, None] == chunks
    return visible


def grouped_logits(inputs: AttentionInputs) -> Float[Tensor, "K R Q S"]:
    """Float32 logits by kv head and query head of its group, not masked."""
    scaled, (kv_heads, tokens, size) = inputs.queries.float() * inputs.scaling, inputs.keys.shape
    queries = scaled.reshape(kv_heads, -1, tokens, size)
    logits = queries @ inputs.keys.float()[:, None].transpose(-1, -2)
    return cap_logits(logits, inputs.softcap)


@contextmanager
def layer_inputs(decoder: Decoder, show: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Context in which `show` gets the index of each layer and the input of its attention."""

    def record(index: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        show(index, (args[0] if args else named["hidden_states"])[0])

    def install(index: int, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(partial(record, index), with_kwargs=True)

    with forward_hooks(
        install(index, attention) for index, attention in decoder.attentions.items()
    ):
        yield
