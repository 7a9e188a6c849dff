"""Long-rope: exact up to the length at which the frequencies change, refused behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import larder
from architectures.families import families
from larder.cache import SequenceCache
from larder.core import InputError
from larder.interop import LarderCache
from larder.models import wrap_model
from model_runs import native_logits, read_on, some_ids

LIMIT = 128  # tokens, of the family's tiny configuration
IDS = some_ids(LIMIT + 1)
MESSAGE = "reaches 129 tokens, but the RoPE frequencies of the model change behind 128"


def tiny_phi3() -> Any:
    return next(row for row in families() if row.name == "Phi-3 (long-rope)").model()


def test_logits_up_to_the_rope_limit_equal_the_model_and_later_tokens_are_refused() -> None:
    model = tiny_phi3()
    native_logits(model, IDS)  # sets the frequencies of longer texts
    expected = native_logits(model, IDS[:LIMIT])
    with wrap_model(model) as decoder:
        held = SequenceCache(decoder.spec, "ragged")
        got = read_on(decoder, held, IDS[:LIMIT], 40)
        assert (got - expected).abs().max() < 1e-4
        with pytest.raises(InputError, match=MESSAGE):
            read_on(decoder, held, IDS[LIMIT:], 1)
        assert held.next_position == LIMIT
    longer = native_logits(model, IDS)[:LIMIT]
    assert (longer - expected).abs().max() > 0.1


@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("keydiff", 64)])
def test_answers_beyond_the_rope_limit_are_refused(policy: str, budget: int | None) -> None:
    """Phi-3 drops a cache that is true where its frequencies change."""
    model, prompt = tiny_phi3(), torch.tensor([IDS[: LIMIT - 3]])
    greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with larder.applied(model, policy=policy, budget=budget):
        assert model.generate(prompt, max_new_tokens=4, **greedy).shape[1] == LIMIT + 1
        with pytest.raises(InputError, match=MESSAGE):
            model.generate(prompt, max_new_tokens=5, **greedy)
    held = LarderCache(model, policy, budget)
    with pytest.raises(InputError, match=MESSAGE):
        model.generate(prompt, past_key_values=held, max_new_tokens=9, **greedy)
