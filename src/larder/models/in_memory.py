"""Models that a program holds: checked, and wrapped without a change to their other uses."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from larder.core.errors import BadParameter, ModelError
from larder.models.loader import LoadedModel, wrap_model

TOKENIZER_CALL = "transformers.AutoTokenizer.from_pretrained(NAME)"
LEAST_COVERAGE = 0.5  # of the embedding rows; models pad them by a few per cent


def wrap_in_memory(model: nn.Module, tokenizer: Any) -> LoadedModel:
    """Verified decoder around a model and its tokenizer; weights are not copied.

    The model has Larder's attention during calls of the decoder alone, so that its own `generate`
    and `forward` stay what they were. A model under a peft adapter is computed with the adapter.

    Args:
        model: causal language model of transformers in eval mode, or a peft model around one.
        tokenizer: its fast tokenizer.

    Raises:
        BadParameter: the tokenizer is missing, or not of this model.
        ModelError: not a decoder of transformers, or it uses an unsupported feature.
    """
    base = _without_adapter_wrapper(model)
    _check_decoder(base)
    check_tokenizer(tokenizer, base)
    decoder = wrap_model(base)
    decoder.share()
    # Not the name of a folder: identities of saved caches come from the weights in memory.
    return LoadedModel(decoder, tokenizer, f"{type(base).__name__} in memory")


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Check that a tokenizer fits a model.

    Raises:
        BadParameter: it is missing, of another type, slow, or has another vocabulary.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = "None" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise BadParameter(
            f"tokenizer must be the tokenizer of the model, got {given}: give "
            f"{TOKENIZER_CALL}, or the `tokenizer` of a processor."
        )
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


def _without_adapter_wrapper(model: Any) -> Any:
    """Model of transformers inside a peft model, adapter layers included; others as they are.

    Raises:
        ModelError: the adapter is not made of weights.
    """
    peft = sys.modules.get("peft")  # a model that it wraps exists only where it is loaded
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config: Any = model.active_peft_config
    if config.is_prompt_learning:
        raise ModelError(
            f"The adapter is {config.peft_type}, which adds keys and values that no token has: "
            "Larder takes adapters of weights, such as LoRA."
        )
    return model.get_base_model()


def _check_decoder(model: Any) -> None:
    """Raise ModelError unless the module is a causal language model in eval mode."""
    from transformers import PreTrainedModel

    kind = type(model).__name__
    dynamo = sys.modules.get("torch._dynamo")  # a compiled module exists only where it is loaded
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if is_wrapped or model._compiled_call_impl is not None:
        raise ModelError(
            "The model is compiled, which fixes its attention: give Larder the model as it was "
            "before torch.compile."
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{kind} is not a model of transformers: give one of transformers.AutoModelForCausalLM."
        )
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"{kind} is an encoder with a decoder, whose cross attention Larder does not manage: "
            "give a decoder-only model (Llama, Qwen, Mistral, Phi3, Gemma3, ...)."
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ModelError(
            f"{kind} does not generate text: load it with a language-model head, as "
            "transformers.AutoModelForCausalLM does."
        )
    if model.training:
        raise ModelError(f"{kind} is in training mode: call model.eval() first.")
    _check_device(model)


def _check_device(model: Any) -> None:
    """Raise ModelError unless all weights lie on one device."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"The weights of {type(model).__name__} lie on {', '.join(devices)}, but Larder's "
            "caches lie on one device: load the model with device_map={'': DEVICE}."
        )
