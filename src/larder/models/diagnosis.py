"""Diagnosis of a failed verification: which part of a model gives other logits through Larder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention, PrivateConfigs
from larder.models.decoder import Decoder
from larder.models.introspection import has_quantized_weights, own_logits, relative_difference

SHORTER_TEXTS = (1, 2, 4, 8, 16)  # tokens
OWN_FUNCTIONS = ("eager", "sdpa")  # attention functions of transformers


@torch.no_grad()
def differing_part(
    decoder: Decoder,
    ids: Sequence[int],
    expected: Float[Tensor, "Q V"],
    got: Float[Tensor, "Q V"],
    tolerance: float,
) -> str:
    """Sentence on the part of a model that differs, and the way out. Releases the decoder.

    In this order: quantized weights with which the model contradicts itself on a shorter text; a
    dtype in which its two own attention functions differ as much; attention to later tokens; the
    first layer whose attention gives other outputs; else what depends on a text being read in
    parts.

    Args:
        expected, got: logits of the model on its own, and through Larder.
        tolerance: largest relative difference that rounding explains.
    """
    module = decoder.module
    with _attention_outputs(decoder) as ours:
        decoder.forward_uncached(ids, CausalAttention(_ignore))
    decoder.release()
    name = module.config._attn_implementation
    alone = _difference_alone(module, ids, expected)
    changed = f"its own logits of a text change by {alone:.2g} when the text continues"
    if has_quantized_weights(module) and alone > tolerance:
        return (
            f"quantized weights: {changed}, because activations are quantized together. Quantize "
            "weights alone, or load it in bfloat16."
        )
    if decoder.spec.dtype is not torch.float32 and (other := _rounding(module, ids, expected, got)):
        return (
            f"dtype {decoder.spec.dtype}, in which its own attention functions {name!r} and "
            f"{other!r} differ as much. Load it in float32."
        )
    if alone > tolerance:
        return f"attention, which looks at later tokens: {changed}. Choose a causal language model."
    with _attention_outputs(decoder) as theirs:
        own_logits(module, ids)
    for layer, attention in decoder.attentions.items():
        difference = relative_difference(ours[layer], theirs[layer])
        if difference > tolerance:
            return (
                f"attention of layer {decoder.spec.number_of(layer)} "
                f"({type(attention).__name__} with {name!r}, difference "
                f"{difference:.2g}), which has a feature that Larder does not support. Load it "
                "with attn_implementation='sdpa', or choose another model."
            )
    return (
        "attention over cached tokens: read in one piece the text gives the same, read in blocks "
        "it does not, so that keys depend on more than tokens and positions. Choose another model."
    )


def _difference_alone(module: Any, ids: Sequence[int], expected: Float[Tensor, "Q V"]) -> float:
    """Largest relative difference of the model's own logits when a text ends earlier."""
    ends = [end for end in SHORTER_TEXTS if end < len(ids)]
    got = [own_logits(module, ids[:end])[-1] for end in ends]
    last = expected[[end - 1 for end in ends]]
    rows = (torch.stack(got) - last).square().mean(-1).sqrt()
    return float(rows.max() / expected.std().clamp_min(1e-6))


def _rounding(
    module: Any, ids: Sequence[int], expected: Float[Tensor, "Q V"], got: Float[Tensor, "Q V"]
) -> str:
    """Attention function of transformers that differs from the model's own as much as Larder's,
    and from Larder's too; empty if none does.
    """
    error = relative_difference(got, expected)
    for other in OWN_FUNCTIONS if module._supports_sdpa else ("eager",):
        logits = _logits_with(module, other, ids)
        near, away = (relative_difference(logits, each) for each in (expected, got))
        if min(near, away) >= error / 4:
            return other
    return ""


def _logits_with(module: Any, attention: str, ids: Sequence[int]) -> Float[Tensor, "Q V"]:
    """Logits with another attention function of transformers; the model is unchanged."""
    configs = PrivateConfigs(module)
    try:
        module.set_attn_implementation(attention)
        return own_logits(module, ids)
    finally:
        configs.restore()


@contextmanager
def _attention_outputs(decoder: Decoder) -> Iterator[dict[int, Float[Tensor, "Q hidden"]]]:
    """Output of every attention module by layer, filled in during a forward of the model."""
    outputs: dict[int, Tensor] = {}

    def record(layer: int, output: Any) -> None:
        outputs[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    with forward_hooks(
        attention.register_forward_hook(
            lambda module, args, output, layer=layer: record(layer, output)
        )
        for layer, attention in decoder.attentions.items()
    ):
        yield outputs


def _ignore(inputs: AttentionInputs) -> None:
    del inputs
