"""Models that a program holds: checked, and wrapped without a change to their other uses."""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from larder.core.arguments import check_type
from larder.core.errors import BadParameter, ModelError
from larder.core.progress import ProgressStage, silent_stage
from larder.models.decoder import Decoder
from larder.models.introspection import check_mode, check_not_compiled
from larder.models.loader import LoadedModel, wrap_model
from larder.models.placement import check_placement
from larder.models.processor import tokenizer_of
from larder.models.verification import check_tokenizer


def wrap_in_memory(
    model: nn.Module, tokenizer: Any, processor: Any = None, stage: ProgressStage = silent_stage
) -> LoadedModel:
    """Verified decoder around a model and its tokenizer; weights are not copied.

    The model has Larder's attention during calls of the decoder alone, so that its own `generate`
    and `forward` stay what they were. A model under a peft adapter is computed with the adapter.

    Args:
        model: causal language model of transformers in eval mode, or a peft model around one.
        tokenizer: its fast tokenizer; None for that of `processor`.
        processor: its processor, where it has a vision tower.
        stage: opens the stage of verification.

    Raises:
        BadParameter: the tokenizer is missing, or not of this model.
        ModelError: not a decoder of transformers, or it uses an unsupported feature.
    """
    base = without_adapter_wrapper(model)
    check_decoder(base)
    if tokenizer is None and processor is not None:
        tokenizer = tokenizer_of(processor)
    check_tokenizer(tokenizer, base)
    decoder = shared_decoder(base, stage)
    # Not the name of a folder: identities of saved caches come from the weights in memory.
    return LoadedModel(decoder, tokenizer, f"{type(base).__name__} in memory")


def verified_model(
    model: Any, tokenizer: Any, processor: Any, stage: ProgressStage = silent_stage
) -> LoadedModel:
    """Loaded model as it is, or a model in memory with its tokenizer, verified.

    Raises:
        BadParameter: it is neither, or a loaded model is given another tokenizer.
        ModelError: as `wrap_in_memory`.
    """
    if not isinstance(model, LoadedModel):
        expected = "a model of transformers, or what larder.models.loader.load returned"
        check_type("model", model, nn.Module, f"{expected} (Engine.load takes names)")
        return wrap_in_memory(model, tokenizer, processor, stage)
    if tokenizer is not None:
        raise BadParameter(
            "A loaded model has its tokenizer: leave tokenizer out, and give a policy by keyword, "
            "as in Engine(loaded, policy='full')."
        )
    return model


def shared_decoder(base: Any, stage: ProgressStage = silent_stage) -> Decoder:
    """Verified decoder around a checked model, which has Larder's attention during its calls."""
    decoder = wrap_model(base, stage=stage)
    decoder.share()
    return decoder


def without_adapter_wrapper(model: Any) -> Any:
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


def check_one_adapter(body: nn.Module) -> None:
    """Check that no adapter is named for each row of a batch.

    Raises:
        ModelError: peft was given `adapter_names`.
    """
    hooks = (vars(module)["_forward_pre_hooks"].values() for module in body.modules())
    for hook in chain.from_iterable(hooks):
        if isinstance(hook, partial) and "adapter_names" in hook.keywords:
            raise ModelError(
                "adapter_names has an adapter for each row, but the tokens of all rows go through "
                "the model as one: call generate() for the rows of each adapter, with "
                "set_adapter() before."
            )


def check_decoder(model: Any) -> None:
    """Raise ModelError unless the module is a causal language model in eval mode."""
    from transformers import PreTrainedModel

    kind = type(model).__name__
    check_not_compiled(model)
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
    check_mode(model)
    check_placement(model)
