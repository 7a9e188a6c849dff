"""Verification of a loaded model, whose logits through Larder's attention must equal its own;
diagnosis of which part of it gives other logits; and check of its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_type
from larder.core.errors import BadParameter, ModelError
from larder.core.types import HiddenStates, Mode
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention, PrivateConfigs
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.introspection import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    has_quantized_weights,
    native_logits,
    relative_difference,
    stored_weights,
)
from larder.models.lm_head import LMHead
from larder.models.placement import input_placement
from larder.models.recurrent import recurrent_layers

CHECKED_TOKENS = 24
# Covers blocks, a short last block and single tokens.
PARTS = ((0, 10), (10, 18), *((index, index + 1) for index in range(18, CHECKED_TOKENS)))
# Between a text in one piece and in parts, in transformers alone: recurrent layers of some families
# limit a number in one of the two ways of computing them.
CONTINUATION_TOLERANCE = 1.5e-1
TOKENIZER_CALL = "transformers.AutoTokenizer.from_pretrained(NAME)"
EXPECTED = f"the tokenizer of the model, as by {TOKENIZER_CALL}, or the one of its processor"
LEAST_COVERAGE = 0.5  # of the embedding rows; models pad them by a few per cent
SHORTER_TEXTS = (1, 2, 4, 8, 16)  # tokens
OWN_FUNCTIONS = ("eager", "sdpa")  # attention functions of transformers


@torch.no_grad()
def reference_logits(module: Any) -> Float[Tensor, "Q V"]:
    """Logits of the model on its own attention for the text of `verify`.

    With recurrent layers they are those of the text in the same parts, because such layers may
    compute one token in another way than several.

    Raises:
        ModelError: the model fails on its own, a logit is not finite, or recurrent layers do not
            continue a text.
    """
    try:
        logits = native_logits(module, _probe_ids(module))
        if recurrent_layers(module.config):
            logits = _logits_in_parts(module, logits)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        found = sorted({str(weight.dtype) for weight in module.parameters()})
        raise ModelError(
            f"{type(module).__name__} fails on a short text on its own ({reason}), with weights "
            f"in {', '.join(found)}: bring it to one dtype, as by model.to(torch.float32)."
        ) from error
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(_not_finite(module))
    return logits


def _logits_in_parts(module: Any, whole: Float[Tensor, "Q V"]) -> Float[Tensor, "Q V"]:
    """Logits of a text that the model reads in parts over transformers' own cache.

    Args:
        whole: logits of the text in one piece.
    """
    device = input_placement(module)[1]
    ids = torch.tensor([_probe_ids(module)], device=device)
    cache = transformers.DynamicCache(config=module.config)
    positions = torch.arange(CHECKED_TOKENS, device=device)[None]
    try:
        outputs = [
            module(input_ids=ids[:, a:b], position_ids=positions[:, a:b], past_key_values=cache)
            for a, b in PARTS
        ]
    except ValueError as error:
        raise ModelError(
            f"{type(module).__name__} has recurrent layers and does not take a DynamicCache of "
            f"transformers ({str(error).rstrip('.')}): Larder cannot hold their states, choose "
            "another model."
        ) from error
    parts = [output.logits[0].float() for output in outputs]
    error = relative_difference(torch.cat(parts), whole)
    if error > CONTINUATION_TOLERANCE:
        raise ModelError(
            f"{type(module).__name__} gives other logits in transformers if a text is read in "
            f"parts (difference {error:.2g} of their spread): its recurrent layers do not continue "
            "from a state over several tokens. Choose another model."
        )
    return torch.cat(parts)


def _not_finite(module: Any) -> str:
    """Message on logits that are not finite."""
    weights = (weight for _, weight in stored_weights(module) if weight.is_floating_point())
    if all(bool(torch.isfinite(weight).all()) for weight in weights):
        return (
            "The model's logits are not finite on a short text, though its weights are: its dtype "
            f"{module.dtype} overflows. Load it in float32 or bfloat16."
        )
    return (
        "The model's logits are not finite on a short text: its weights hold NaN or infinity. "
        "Load intact weights, or another dtype."
    )


def verify(decoder: Decoder, expected: Float[Tensor, "Q V"]) -> None:
    """Compare the logits of a short text, read block by block and token by token.

    The error is the largest over all logits, and in bfloat16 and with quantized weights the
    largest root mean square over a token's logits. The largest of all would be mostly rounding
    there: between two attention functions of torch, 0.19 of the spread for SmolLM2, where the root
    mean square is 0.09.

    Raises:
        ModelError: the dtype is none that Larder takes, or Larder's logits differ from the model's
            own by more than it explains; the message names the part that differs. The decoder is
            released.
    """
    dtype = decoder.spec.dtype
    if dtype not in TOLERANCE:
        known = ", ".join(str(each).removeprefix("torch.") for each in TOLERANCE)
        raise ModelError(
            f"{type(decoder.module).__name__} computes in {dtype}, but Larder takes models in "
            f"{known}: convert it, as with model.to(torch.float32)."
        )
    ids = _probe_ids(decoder.module)
    got = _logits_through(decoder, ids)
    is_quantized, tolerance = has_quantized_weights(decoder.module), TOLERANCE[dtype]
    error = float((got - expected).abs().max() / expected.std().clamp_min(1e-6))
    if dtype is torch.bfloat16 or is_quantized:
        error = relative_difference(got, expected)
    if is_quantized:
        tolerance = max(tolerance, QUANTIZED_TOLERANCE)
    if not error <= tolerance:
        part = differing_part(decoder, ids, expected, got, tolerance)
        raise ModelError(
            f"Through Larder's attention {type(decoder.module).__name__} gives other logits than "
            f"on its own (difference {error:.2g} of their spread, tolerance {tolerance:.2g} in "
            f"{dtype}). The part that differs: {part}"
        )


@torch.no_grad()
def _logits_through(decoder: Decoder, ids: Sequence[int]) -> Float[Tensor, "Q V"]:
    """Logits of a text that Larder reads in parts.

    The head, which is most of a small model with a large vocabulary, is read twice in all: once for
    the states of all parts but the last together, and once in the call of the last.
    """
    cache = SequenceCache(decoder.spec, "ragged")
    *before, last = [BatchSegment(cache, tuple(ids[a:b])) for a, b in PARTS]
    states = [decoder.read([part], Mode.APPEND)[0] for part in before]
    logits = decoder.forward_logits([last], Mode.APPEND, range(last.num_tokens))
    return torch.cat([LMHead(decoder.module).logits(torch.cat(states)), logits])


def _probe_ids(module: Any) -> list[int]:
    """Fixed token ids, spread over the vocabulary."""
    size = int(module.get_input_embeddings().weight.shape[0])
    return [(7 + 31 * i * i) % size for i in range(CHECKED_TOKENS)]


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Check that a tokenizer fits a model.

    Raises:
        BadParameter: it is missing, of another type, slow, or has another vocabulary.
    """
    from transformers import PreTrainedTokenizerBase

    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, EXPECTED)
    if not tokenizer.is_fast:
        raise BadParameter(
            f"The tokenizer {type(tokenizer).__name__} reports no character offsets, because it is "
            f"not a fast one: give {TOKENIZER_CALL}."
        )
    rows, tokens = int(model.get_input_embeddings().weight.shape[0]), len(tokenizer)
    if tokens > rows or tokens < LEAST_COVERAGE * rows:
        raise BadParameter(
            f"The tokenizer has {tokens} tokens, but the model's embedding has {rows} rows: give "
            "the tokenizer that came with the model, or call model.resize_token_embeddings(len("
            "tokenizer)) if tokens were added."
        )


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
        native_logits(module, ids)
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
    got = [native_logits(module, ids[:end])[-1] for end in ends]
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
        return native_logits(module, ids)
    finally:
        configs.restore()


@contextmanager
def _attention_outputs(decoder: Decoder) -> Iterator[dict[int, HiddenStates]]:
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
