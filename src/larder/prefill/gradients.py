"""Gradients of a scratch pass: how much the last hidden states depend on each attention output.

Attention kernels and caches carry no gradient. So the model reads the scratch prompt over an
attention of cached entries and of the prompt itself that gradients of the prompt pass through,
and a number that is added to the output of each layer's attention, zero, is what the objective is
derived by. The cache is only read; weights get no gradient. The activations of one prompt are held
until its backward pass ends, without attention weights, which the backward pass computes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from larder.cache.sequence import SequenceCache
from larder.core.errors import UsageError
from larder.core.observation import Observation, ScratchPrompt
from larder.core.part import LOG_COUNT
from larder.core.types import HiddenStates, Queries
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, RenumberedAttention
from larder.models.decoder import Decoder
from larder.models.introspection import call_uncached, check_unchanged
from larder.models.token_selection import decoder_layers
from larder.ops.attention import sink_logits, sinks_by_group
from larder.ops.attention_gradient import EarlierEntries, attend_with_gradients
from larder.policy.providers.base import GradientProvider
from larder.prefill.eviction_pass import LayerInputs, rotate_to_cache_positions


def gradient_inputs(
    decoder: Decoder,
    cache: SequenceCache,
    prompt: ScratchPrompt,
    providers: Mapping[str, GradientProvider],
) -> LayerInputs:
    """Numbers of each token of a scratch prompt in each layer; the cache does not change.

    Raises:
        UsageError: the model has recurrent layers, whose state this pass has not, or the text has
            images, whose positions it has not.
        ModelError: the layers of the model are not in one list.
    """
    if not providers:
        return {}
    if decoder.spec.recurrent:
        raise UsageError(
            "The model has recurrent layers, through which no gradient is taken: choose a policy "
            "without kvgrad()."
        )
    if not cache.model_positions.are_true:
        raise UsageError(
            "The text has images, whose tokens have positions of their own, but gradients are "
            "taken at positions of texts: choose a policy without kvgrad()."
        )
    check_unchanged(decoder.module, decoder.spec)
    found: dict[int, dict[str, Tensor]] = {index: {} for index in decoder.attentions}
    for name, provider in providers.items():
        for layer, gradients in _layer_gradients(decoder, cache, prompt, provider).items():
            found[layer][name] = provider.numbers(gradients)
    return found


def _layer_gradients(
    decoder: Decoder, cache: SequenceCache, prompt: ScratchPrompt, provider: GradientProvider
) -> dict[int, HiddenStates]:
    """Gradient of a provider's objective by the attention outputs of each layer."""
    start = cache.next_position + prompt.shift
    device, count = decoder.spec.device, len(prompt.ids)
    positions = torch.arange(start, start + count, device=device)
    recorder = _OutputRecorder()
    last = decoder_layers(decoder.body, decoder.body.config.get_text_config().num_hidden_layers)[-1]
    attention = RenumberedAttention(_EntryAttention(cache, positions), decoder.spec)
    handles = recorder.install(decoder.attentions, last)
    with torch.enable_grad(), decoder.attention, forward_hooks(handles):
        call_uncached(decoder.body, prompt.ids, attention, positions)
        objective = provider.objective(recorder.states[0])
        layers = list(recorder.added)
        gradients = torch.autograd.grad(objective, [recorder.added[index] for index in layers])
    return {index: gradient[0].detach() for index, gradient in zip(layers, gradients, strict=True)}


class _OutputRecorder:
    """Hooks that add zeros to attention outputs, and hold the states behind the last layer."""

    def __init__(self) -> None:
        self.added: dict[int, Float[Tensor, "1 Q hidden"]] = {}
        self.states: Float[Tensor, "1 Q hidden"] = torch.empty(0)

    def install(self, attentions: Mapping[int, nn.Module], last: nn.Module) -> Iterator[Any]:
        """Handles of the hooks, as they are installed."""
        for index, module in attentions.items():
            yield module.register_forward_hook(self._adding(index))
        yield last.register_forward_hook(self._record)

    def _adding(self, index: int) -> Any:
        def add(module: nn.Module, args: Any, output: Any) -> Any:
            states, *others = output if isinstance(output, tuple) else (output,)
            zeros = torch.zeros_like(states, requires_grad=True)
            self.added[index] = zeros
            return (states + zeros, *others) if isinstance(output, tuple) else states + zeros

        return add

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        self.states = output[0] if isinstance(output, tuple) else output


class _EntryAttention:
    """Attention of a scratch prompt over cached entries and itself, which gradients pass through.

    Args:
        positions: true positions of the prompt's tokens.
    """

    def __init__(self, cache: SequenceCache, positions: Int[Tensor, " Q"]) -> None:
        self._cache, self._positions = cache, positions

    def attend(self, inputs: AttentionInputs) -> Queries:
        layer = self._cache.spec.layers[inputs.layer]
        source = layer.index if layer.kv_source is None else layer.kv_source
        observation = Observation(
            layer,
            self._cache.entries(source),
            inputs.queries_at(self._positions),
            self._positions,
            self._cache.next_position,
            (0, 0),
            keys=inputs.keys,
        )
        observation = rotate_to_cache_positions(observation, 0)
        heads = range(layer.kv_heads)
        values = inputs.values if not layer.latent_rank else inputs.keys[..., : layer.latent_rank]
        outs = [_attend_head(observation, head, values[head]) for head in heads]
        return torch.cat(outs).to(inputs.queries.dtype)


def _attend_head(
    observation: Observation, head: int, own_values: Float[Tensor, "Q Dv"]
) -> Float[Tensor, "R Q Dv"]:
    """Attention of the query heads of one kv head."""
    layer, entries = observation.layer, observation.entries
    bias = entries.columns.get(LOG_COUNT)
    keys = entries.head_keys(head)
    earlier = EarlierEntries(
        keys,
        entries.head_values(head),
        entries.head_positions(head).long(),
        observation.query_positions,
        layer.first_visible(observation.query_positions),
        layer.scaling,
        layer.softcap,
        sinks_by_group(sink_logits(layer, keys), layer.kv_heads)[head],
        None if bias is None else bias[entries.rows(head)],
    )
    queries = observation.queries[head * layer.group : (head + 1) * layer.group]
    return attend_with_gradients(queries, observation.keys[head], own_values, earlier)
