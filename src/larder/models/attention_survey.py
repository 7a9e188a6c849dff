"""Survey of a model: the specification of its caches, from the attention calls of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys
from larder.models.attention_backend import (
    CHUNKED,
    AttentionInputs,
    AttentionProbe,
    CausalAttention,
)
from larder.models.introspection import call_uncached, fingerprint
from larder.models.placement import check_devices, input_placement, loaded_tensor
from larder.models.recurrent import RecurrentModules, RecurrentSurvey, layer_kinds, recurrent_layers
from larder.ops.rope import rotate

SURVEY_TOKENS = 8  # of a text that shows the attention calls of every layer
FULL, SLIDING = "full_attention", "sliding_attention"
# Kinds of layers with attention, some beside a recurrent state, and the attention they have.
ATTENTION_KINDS = {
    FULL: FULL,
    SLIDING: SLIDING,
    CHUNKED: SLIDING,
    "hybrid": FULL,
    "hybrid_sliding": SLIDING,
}
M_ROPE_SECTION = "mrope_section"  # attribute of RoPE with several positions per token
ROPE_BUFFER = "inv_freq"  # buffer name of RoPE frequencies in transformers
ROTATION_TOKENS = 4  # several, because the embedding of padding may be all zeros
ROTATION_POSITIONS = 8


@torch.no_grad()
def survey_model(module: Any, body: Any) -> tuple[ModelSpec, RecurrentModules]:
    """Specification of a model's caches, and its recurrent layers, from calls of its layers.

    Args:
        module: model on Larder's attention.
        body: its layers without the head.

    Raises:
        ModelError: a layer does not call attention, or has an unsupported feature.
    """
    num_tokens = min(SURVEY_TOKENS, len(module.get_input_embeddings().weight))
    survey, ids, counts = AttentionSurvey(), range(num_tokens), recurrent_layers(module.config)
    recurrent = RecurrentModules()
    if counts:
        states = RecurrentSurvey(counts)
        with states.installed(body):
            call_uncached(body, ids, survey, past_key_values=states)
        recurrent = states.modules()
    else:
        call_uncached(body, ids, survey)
    numbers = tuple(sorted(survey.layers))
    _check_attention_layers(module, numbers)
    found = [survey.layers[number] for number in numbers]
    check_attention_kinds(module.config, found)
    found = _renumbered(found, numbers)
    with recurrent.silenced():
        layers = measure_rotation(body, found, numbers)
    spec = ModelSpec(
        layers,
        *input_placement(module),
        fingerprint(module),
        module.config.get_text_config().hidden_size,
        numbers if numbers != tuple(range(len(numbers))) else (),
        recurrent.specs,
        layer_devices=survey.devices(),
    )
    check_devices(module, spec)
    return spec, recurrent


def _renumbered(layers: Sequence[LayerSpec], numbers: Sequence[int]) -> list[LayerSpec]:
    """Layer specs numbered from 0, given their numbers in the model."""
    indices: dict[int | None, int] = {number: index for index, number in enumerate(numbers)}
    return [
        replace(layer, index=index, kv_source=indices.get(layer.kv_source))
        for index, layer in enumerate(layers)
    ]


def _check_attention_layers(module: Any, numbers: Sequence[int]) -> None:
    """Check that all layers that should call attention did."""
    config = module.config.get_text_config()
    kinds = layer_kinds(config) if recurrent_layers(config) else ()
    expected = {index for index, kind in enumerate(kinds) if kind in ATTENTION_KINDS}
    expected = expected if kinds else set(range(config.num_hidden_layers))
    if set(numbers) != expected or not expected:
        raise ModelError(
            f"{type(module).__name__} has {len(expected)} layers with attention, but only "
            f"{list(numbers)} call it through transformers' interface: Larder needs every layer "
            "to do so, choose another model."
        )


def check_attention_kinds(config: Any, layers: Sequence[LayerSpec]) -> None:
    """Check that the attention kinds of the configuration agree with the attention calls.

    A window or a chunk may exist in the mask alone, which Larder does not use, and may start to
    matter only behind the text that a model is verified with. Configurations of older transformers
    name no kinds; there the window of the call is all that is known.

    Args:
        layers: specs from the survey, in order, with their numbers in the model.

    Raises:
        ModelError: a kind is unknown or differs from the call.
    """
    chunk = config.get_text_config().to_dict().get("attention_chunk_size")
    kinds = layer_kinds(config)
    for layer in layers:
        if layer.index < len(kinds):
            _check_layer(layer, kinds[layer.index])
    if chunk and not kinds:
        raise ModelError(
            f"The model attends in chunks of {chunk} tokens (attention_chunk_size), but its "
            "configuration does not say in which layers: set layer_types, or choose another model."
        )


def _check_layer(layer: LayerSpec, kind: str) -> None:
    if kind not in ATTENTION_KINDS:
        raise ModelError(
            f"Layer {layer.index} is of the kind {kind!r}; Larder supports {FULL!r}, "
            f"{SLIDING!r} and {CHUNKED!r}: choose a model of these."
        )
    if (ATTENTION_KINDS[kind] == SLIDING) != (layer.sliding_window is not None):
        raise ModelError(
            f"Layer {layer.index} is of the kind {kind!r}, but called attention with the window "
            f"{layer.sliding_window}: the two disagree, choose another model."
        )


@torch.no_grad()
def measure_rotation(
    model: Any, layers: Sequence[LayerSpec], numbers: Sequence[int]
) -> tuple[LayerSpec, ...]:
    """Layer specs with the RoPE frequencies that explain the keys of a probe text.

    Without them where RoPE counts several positions per token, as M-RoPE does in images: keys
    cannot be rotated by one true position there. Those of latents are unknown:
    RoPE rotates their last channels alone.

    Args:
        numbers: number of each layer in the model.
    """
    if any(M_ROPE_SECTION in vars(part) for part in model.modules()):
        return tuple(layers)
    vocabulary = len(model.get_input_embeddings().weight)
    device, probe = input_placement(model)[1], AttentionProbe()
    parts = torch.arange(1, ROTATION_TOKENS + 1, device=device)
    tokens = parts * vocabulary // (ROTATION_TOKENS + 1)
    positions = torch.arange(ROTATION_POSITIONS, device=device)
    model(
        input_ids=tokens.repeat_interleave(ROTATION_POSITIONS)[None],
        position_ids=positions.repeat(ROTATION_TOKENS)[None],
        use_cache=False,
        larder=probe,
    )
    known = [
        loaded_tensor(model, name, buffer).to(device)
        for name, buffer in model.named_buffers()
        if name.endswith(ROPE_BUFFER)
    ]
    return tuple(
        layer
        if layer.latent_rank
        else replace(
            layer, radians=_best_frequencies(probe.seen[number].keys.to(device), positions, known)
        )
        for number, layer in zip(numbers, layers, strict=True)
    )


def _best_frequencies(
    keys: Keys, positions: Int[Tensor, " P"], known: Sequence[Float[Tensor, " _"]]
) -> tuple[float, ...] | None:
    """Frequencies that best rotate a token's first key into its others; None if none fits."""
    same = (
        keys.float().unflatten(1, (ROTATION_TOKENS, ROTATION_POSITIONS)).flatten(0, 1)
    )  # [K * tokens, P, D]
    still = torch.empty(0, device=keys.device)
    fitting = [radians.float() for radians in known if 2 * len(radians) <= keys.shape[2]]
    tried = [(_rotation_error(same, positions, radians), radians) for radians in [still, *fitting]]
    error, best = min(tried, key=lambda pair: pair[0])
    return tuple(best.tolist()) if error < torch.finfo(keys.dtype).eps ** 0.5 else None


def _rotation_error(
    keys: Float[Tensor, "N P D"], positions: Int[Tensor, " P"], radians: Float[Tensor, " half"]
) -> float:
    """Largest distance of a key from its token's first key rotated, relative to the longest key."""
    rotated = rotate(keys[:, :1].expand_as(keys), positions, radians)
    longest = keys.norm(dim=-1).max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((rotated - keys).norm(dim=-1).max() / longest)


class AttentionSurvey(CausalAttention):
    """Plain causal attention that records the attention spec of each layer."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.layers: dict[int, LayerSpec] = {}
        self._keys: dict[int, Keys] = {}  # held, so that no other layer gets the same memory

    def devices(self) -> tuple[torch.device, ...]:
        """Device of each layer that was called, in order; empty where it is the same for all."""
        found = tuple(self._keys[number].device for number in sorted(self._keys))
        return found if len(set(found)) > 1 else ()

    def _record(self, inputs: AttentionInputs) -> None:
        layer, queries, keys, values = inputs.layer, inputs.queries, inputs.keys, inputs.values
        if layer in self.layers:
            raise ModelError(f"Layer {layer} called attention twice in one forward: not supported.")
        if values.shape != keys.shape:
            raise ModelError(
                f"Layer {layer} has keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                "(K S D): heads of different size are not supported, choose another model."
            )
        sizes = queries.shape[0], keys.shape[0], keys.shape[2]
        spec = LayerSpec(
            layer,
            *sizes,
            inputs.scaling,
            inputs.sliding_window,
            softcap=inputs.softcap,
            sinks=tuple(inputs.sinks.tolist()),
            chunk=inputs.chunk,
            latent_rank=inputs.latent_rank,
        )
        if spec.latent_rank and spec.sliding_window is not None:
            raise ModelError(
                f"Layer {layer} caches latents of {spec.latent_rank} numbers in a sliding window, "
                "which Larder does not support: choose another model."
            )
        self.layers[layer] = replace(spec, kv_source=self._kv_source(spec, keys))
        self._keys[layer] = keys

    def _kv_source(self, spec: LayerSpec, keys: Keys) -> int | None:
        """Layer that attended alike to the same keys in memory; None if there is none."""
        for index, earlier in self._keys.items():
            is_alike = replace(spec, index=index) == replace(self.layers[index], kv_source=None)
            if is_alike and earlier.data_ptr() == keys.data_ptr():
                return index
        return None


def latent_hooks(body: nn.Module) -> list[Any]:
    """Handles of the hooks on modules that cache latents; few models have any."""
    if not any(name.endswith("kv_b_proj") for name, _ in body.named_modules()):
        return []
    from larder.models.latent_attention import hook_latent_attention

    return hook_latent_attention(body)
