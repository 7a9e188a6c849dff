"""Attention that a decoder switches while it holds a model: that model's, and no other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, forward_hooks
from larder.ops import MAX_ROWS
from model_runs import native_logits, some_ids
from tiny_models import tiny


def test_models_sharing_a_config_are_switched_separately() -> None:
    one, other = tiny("gemma3"), tiny("gemma3", seed=1)
    shared = one.config
    for part in other.modules():
        if "config" in vars(part):
            part.config = shared
    expected = native_logits(other, some_ids(9))
    with Decoder(one):
        assert one.config._attn_implementation == "larder"
        assert one.model.config is one.config is one.model.layers[0].self_attn.config
        assert other.config is shared and shared._attn_implementation != "larder"
        assert torch.equal(native_logits(other, some_ids(9)), expected)
        with Decoder(other) as second:
            assert second.spec.layers == Decoder(tiny("gemma3")).spec.layers
    assert all(vars(part).get("config", shared) is shared for part in one.modules())
    assert one.config is other.config is shared


def test_layers_are_found_with_a_wrong_base_model_prefix() -> None:
    module = tiny("gemma3")
    module.base_model_prefix = "language_model"  # as in transformers 4.54
    hidden = torch.randn(3, module.config.hidden_size)
    with Decoder(module) as decoder:
        assert decoder.body is module.model
        assert torch.allclose(decoder._head.logits(hidden), module.lm_head(hidden))


@pytest.mark.parametrize(("tokens", "difference"), [(12, 1e-4), (MAX_ROWS + 8, 0)])
def test_attention_function_can_be_wrapped_like_kvpress(tokens: int, difference: float) -> None:
    """Arguments are then passed by position, as transformers' own functions take them.

    A call of few tokens runs the model's own layers then, no decoder stack.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    decoder, called = Decoder(tiny("qwen3")), list[int]()
    inner, ids = ALL_ATTENTION_FUNCTIONS["larder"], some_ids(tokens)

    def wrapper(module, query, key, value, attention_mask, dropout, **rest):
        called.append(module.layer_idx)
        return inner(module, query, key, value, attention_mask, dropout, **rest)

    def logits() -> torch.Tensor:
        row = BatchSegment(SequenceCache(decoder.spec, "dense"), ids)
        return decoder.forward_logits([row], Mode.APPEND, range(len(ids)))

    expected = logits()
    ALL_ATTENTION_FUNCTIONS["larder"] = wrapper
    try:
        torch.testing.assert_close(logits(), expected, atol=difference, rtol=difference)
    finally:
        del ALL_ATTENTION_FUNCTIONS["larder"]  # what is registered shows again
    assert called == [0, 1]


def test_hooks_are_removed_when_one_fails_to_install() -> None:
    module = torch.nn.Linear(2, 2)

    def install() -> Iterator[Any]:
        yield module.register_forward_hook(lambda *_: None)
        raise RuntimeError("no second hook")

    with pytest.raises(RuntimeError, match="no second hook"), forward_hooks(install()):
        pass
    assert not module._forward_hooks
