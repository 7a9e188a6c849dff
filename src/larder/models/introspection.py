"""Introspection of a model: mode, attention implementation, logits, fingerprint, weights."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from larder.core.errors import ModelError
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import HiddenStates
from larder.models.attention_backend import LayerAttention, text_implementation
from larder.models.placement import input_placement, loaded_tensors, weights_loaded
from larder.models.recurrent import recurrent_layers
from larder.policy.providers.base import WeightProvider, select_providers

SAMPLED_VALUES = 64  # per tensor: enough to distinguish fine-tuned siblings, cheap for large models
DIGEST_BYTES = 16  # of a fingerprint
INTEGER_WEIGHTS = (torch.int8, torch.uint8, torch.int32)  # of quantized models
# Largest difference that rounding explains, relative to the spread of the logits. bfloat16 keeps 8
# bits, and sums taken in another order differ in the last few of them.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
QUANTIZED_TOLERANCE = 1.5e-1  # of quantized weights, whose activations may be quantized too


def native_logits(module: Any, ids: Sequence[int]) -> Float[Tensor, "Q V"]:
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


def call_uncached(
    body: Any,
    ids: Sequence[int],
    attention: LayerAttention,
    positions: Int[Tensor, " Q"] | None = None,
    **options: Any,
) -> HiddenStates:
    """Hidden states behind the layers of a model and its last norm, without a cache.

    Args:
        positions: of its tokens; None counts from 0.
        options: further keyword arguments of the body.
    """
    device = input_placement(body)[1]
    true_positions = torch.arange(len(ids), device=device) if positions is None else positions
    out = body(
        input_ids=torch.tensor([ids], device=device),
        position_ids=true_positions[None],
        use_cache=False,
        larder=attention,
        **options,
    )
    return out.last_hidden_state[0]


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
    weights = ((name, weight.detach()) for name, weight in module.named_parameters())
    return any(
        is_traceable_wrapper_subclass(weight) or weight.dtype in INTEGER_WEIGHTS
        for _, weight in weights
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
