"""Introspection of a model: mode, attention calls, kinds, rotation, digest, weights."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys
from larder.models.attention_backend import (
    CHUNKED,
    AttentionInputs,
    AttentionProbe,
    CausalAttention,
    LayerAttention,
    text_implementation,
)
from larder.models.placement import (
    check_devices,
    input_placement,
    loaded_tensor,
    loaded_tensors,
    weights_loaded,
)
from larder.models.recurrent import RecurrentModules, RecurrentSurvey, layer_kinds, recurrent_layers
from larder.ops.rope import rotate
from larder.policy.providers.base import WeightProvider, select_providers

INTEGER_WEIGHTS = (torch.int8, torch.uint8, torch.int32)  # of quantized models
SURVEY_TOKENS = 8  # of a text that shows the attention calls of every layer
# Largest difference that rounding explains, relative to the spread of the logits. bfloat16 keeps 8
# bits, and sums taken in another order differ in the last few of them.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
QUANTIZED_TOLERANCE = 1.5e-1  # of quantized weights, whose activations may be quantized too


def own_logits(module: Any, ids: Sequence[int]) -> Float[Tensor, "Q V"]:
    """Float32 logits of a model of transformers on its own attention."""
    given = torch.tensor([list(ids)], device=input_placement(module)[1])
    return module(input_ids=given, use_cache=False).logits[0].float()


def relative_difference(got: Float[Tensor, "*S"], expected: Float[Tensor, "*S"]) -> float:
    """Largest root mean square over the last dimension, relative to the spread of all."""
    rows = (got.float() - expected.float()).square().mean(-1).sqrt()
    return float(rows.max() / expected.float().std().clamp_min(1e-6))


def check_not_compiled(model: Any) -> None:
    """Raise ModelError if a module, or its method `forward`, is compiled by torch."""
    dynamo = sys.modules.get("torch._dynamo")  # a compiled module exists only where it is loaded
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    # Both torch.compile and torch.compiler.disable leave the function that they wrap.
    forward: Any = getattr(model, "forward", None)
    is_method_wrapped = hasattr(forward, "_torchdynamo_orig_callable")
    is_wrapped |= is_method_wrapped and not hasattr(forward, "_torchdynamo_disable")
    if is_wrapped or getattr(model, "_compiled_call_impl", None) is not None:
        raise ModelError(
            "The model is compiled, which fixes its attention: give Larder the model as it was "
            "before torch.compile."
        )


def check_mode(model: Any) -> None:
    """Raise ModelError if a module is compiled or in training mode; cheap enough for every call."""
    check_not_compiled(model)
    if model.training:
        raise ModelError(f"{type(model).__name__} is in training mode: call model.eval() first.")


def check_unchanged(model: Any, spec: ModelSpec) -> None:
    """Check that a module is still what its caches were specified for; cheap enough for every call.

    Raises:
        ModelError: it is compiled or in training mode, or its weights have another dtype or device.
    """
    check_mode(model)
    dtype, device = input_placement(model)
    if (dtype, device) != (spec.dtype, spec.device):
        raise ModelError(
            f"The weights of {type(model).__name__} are {dtype} on {device}, but its "
            f"caches were specified for {spec.dtype} on {spec.device}: move the model back, or "
            "give it to Larder again."
        )


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


def call_uncached(
    body: Any,
    ids: Sequence[int],
    attention: LayerAttention,
    positions: Int[Tensor, " Q"] | None = None,
    **options: Any,
) -> Float[Tensor, "Q hidden"]:
    """Hidden states behind the layers of a model and its last norm, without a cache.

    Args:
        positions: of its tokens; None counts from 0.
        options: further keyword arguments of the body.
    """
    device = input_placement(body)[1]
    places = torch.arange(len(ids), device=device) if positions is None else positions
    out = body(
        input_ids=torch.tensor([ids], device=device),
        position_ids=places[None],
        use_cache=False,
        larder=attention,
        **options,
    )
    return out.last_hidden_state[0]


def latent_hooks(body: nn.Module) -> list[Any]:
    """Handles of the hooks on modules that cache latents; few models have any."""
    if not any(name.endswith("kv_b_proj") for name, _ in body.named_modules()):
        return []
    from larder.models.latent_attention import hook_latent_attention

    return hook_latent_attention(body)


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
    expected = {number for number, kind in enumerate(kinds) if kind in ATTENTION_KINDS}
    expected = expected if kinds else set(range(config.num_hidden_layers))
    if set(numbers) != expected or not expected:
        raise ModelError(
            f"{type(module).__name__} has {len(expected)} layers with attention, but only "
            f"{list(numbers)} call it through transformers' interface: Larder needs every layer "
            "to do so, choose another model."
        )


FULL, SLIDING = "full_attention", "sliding_attention"
# Kinds of layers with attention, some beside a recurrent state, and the attention they have.
ATTENTION_KINDS = {
    FULL: FULL,
    SLIDING: SLIDING,
    CHUNKED: SLIDING,
    "hybrid": FULL,
    "hybrid_sliding": SLIDING,
}


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


M_ROPE_SECTION = "mrope_section"  # attribute of RoPE with several positions per token
ROPE_BUFFER = "inv_freq"  # buffer name of RoPE frequencies in transformers
ROTATION_TOKENS = 4  # several, because the embedding of padding may be all zeros
ROTATION_POSITIONS = 8


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
    places = torch.arange(ROTATION_POSITIONS, device=device)
    model(
        input_ids=tokens.repeat_interleave(ROTATION_POSITIONS)[None],
        position_ids=places.repeat(ROTATION_TOKENS)[None],
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
            layer, radians=_best_frequencies(probe.seen[number].keys.to(device), places, known)
        )
        for number, layer in zip(numbers, layers, strict=True)
    )


def _best_frequencies(
    keys: Keys, places: Int[Tensor, " P"], known: Sequence[Float[Tensor, " _"]]
) -> tuple[float, ...] | None:
    """Frequencies that best rotate a token's first key into its others; None if none fits."""
    same = (
        keys.float().unflatten(1, (ROTATION_TOKENS, ROTATION_POSITIONS)).flatten(0, 1)
    )  # [K * tokens, P, D]
    still = torch.empty(0, device=keys.device)
    fitting = [radians.float() for radians in known if 2 * len(radians) <= keys.shape[2]]
    tried = [(_rotation_error(same, places, radians), radians) for radians in [still, *fitting]]
    error, best = min(tried, key=lambda pair: pair[0])
    return tuple(best.tolist()) if error < torch.finfo(keys.dtype).eps ** 0.5 else None


def _rotation_error(
    keys: Float[Tensor, "N P D"], places: Int[Tensor, " P"], radians: Float[Tensor, " half"]
) -> float:
    """Largest distance of a key from its token's first key rotated, relative to the longest key."""
    rotated = rotate(keys[:, :1].expand_as(keys), places, radians)
    longest = keys.norm(dim=-1).max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((rotated - keys).norm(dim=-1).max() / longest)


SAMPLED_VALUES = 64  # per tensor: enough to tell fine-tuned siblings apart, cheap for large models
DIGEST_BYTES = 16


def fingerprint(module: Any) -> str:
    """Hexadecimal digest of the configuration and of a sample of every weight."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    config = module.config.to_dict()
    settings = {key: config[key] for key in sorted(config) if not _is_load_detail(key)}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in stored_weights(module):
        flat = weight.flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def stored_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Plain tensors of all weights by name; those that a quantized weight is made of, and integer
    matrices that are held as buffers, one by one.
    """
    parameters = {name for name, _ in module.named_parameters()}
    for name, tensor in loaded_tensors(module):
        if name in parameters:
            yield from _plain_tensors(name, tensor)
        elif tensor.ndim > 1 and tensor.dtype in INTEGER_WEIGHTS:
            yield name, tensor


def _plain_tensors(name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
    if not is_traceable_wrapper_subclass(weight):
        yield name, weight
        return
    for part in weight.__tensor_flatten__()[0]:
        yield from _plain_tensors(f"{name}.{part}", getattr(weight, part))


def has_quantized_weights(module: Any) -> bool:
    """True if the model was loaded quantized, or has weights in integers or in tensor classes."""
    if module.config.to_dict().get("quantization_config"):
        return True
    own = ((name, weight.detach()) for name, weight in module.named_parameters())
    return any(
        is_traceable_wrapper_subclass(weight) or weight.dtype in INTEGER_WEIGHTS
        for _, weight in own
    )


def _is_load_detail(key: str) -> bool:
    """True for configuration entries that depend on how the model was loaded."""
    return key.startswith("_") or key in {"transformers_version", "dtype", "torch_dtype"}


@torch.no_grad()
def weight_inputs(
    modules: Mapping[int, nn.Module], layers: Sequence[LayerSpec], names: Iterable[str]
) -> dict[int, dict[str, Tensor]]:
    """Tensors of the named weight providers, by layer index, then by name.

    Args:
        modules: attention module of each layer, by layer index.

    Raises:
        ModelError: an attention module does not have the weights of a provider.
    """
    providers = select_providers(names, WeightProvider)
    if not providers:
        return {}
    found = dict[int, dict[str, Tensor]]()
    for layer in layers:
        with weights_loaded(module := modules[layer.index]):
            pairs = providers.items()
            found[layer.index] = {name: each.layer_tensor(module, layer) for name, each in pairs}
    return found


def switch_attention(module: Any, name: str) -> None:
    """Set the attention implementation, and check that it is in effect.

    Raises:
        ModelError: the architecture does not dispatch attention through transformers' interface.
    """
    if not _supports_backend(type(module)) and not recurrent_layers(module.config):
        raise ModelError(
            f"{type(module).__name__} does not use transformers' AttentionInterface, so Larder "
            "cannot manage its cache: choose an architecture that does (Llama, Qwen, Mistral, "
            "Phi3, Gemma3, ...)."
        )
    module.set_attn_implementation(text_implementation(module.config, name))
    if module.config.get_text_config()._attn_implementation != name:
        raise ModelError(f"{type(module).__name__} refused the attention implementation {name!r}.")


def _supports_backend(kind: type) -> bool:
    """True if the class declares that it dispatches attention through the public interface."""
    return bool(kind._supports_attention_backend)  # pyright: ignore
