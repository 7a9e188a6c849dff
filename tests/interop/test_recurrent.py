"""Models with recurrent layers inside generate(): each row has its state, also after failures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import larder
from architectures.families import families
from interop.test_batches import GREEDY, padded
from larder.core import CacheError, UsageError
from larder.interop import LarderCache
from model_runs import some_ids

ROWS = [some_ids(40, seed=1), some_ids(23, seed=2), some_ids(9, seed=3)]
POLICIES = {
    "full": ("full", None),
    "blocks": ("blockwise(tokens=16) > protect(sinks=2, recent=4) > keydiff() > pooled()", 20),
    "h2o": ("protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()", 20),
}
NAMES = ["LFM2", "Falcon-H1"]


@cache
def model_of(name: str) -> Any:
    [family] = [family for family in families() if family.name == name]
    return family.model()


def tokens(model: Any, ids: Any, cached: LarderCache, **options: Any) -> list[list[int]]:
    out = model.generate(ids, past_key_values=cached, **GREEDY, **options)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_padded_row_equals_the_single_row(name: str, policy: str) -> None:
    model, sizes = model_of(name), POLICIES[policy]
    ids, mask = padded(ROWS)
    together = LarderCache(model, *sizes)
    got = tokens(model, ids, together, attention_mask=mask, max_new_tokens=6)
    for number, row in enumerate(ROWS):
        alone = LarderCache(model, *sizes)
        assert tokens(model, torch.tensor([row]), alone, max_new_tokens=6) == [got[number]]
        assert alone.lengths() == [together.lengths()[number]]
        states = [each.sequences[0].recurrent.tensors for each in (alone,)]
        states.append(together.sequences[number].recurrent.tensors)
        assert all(torch.allclose(states[0][key], states[1][key], atol=1e-4) for key in states[0])


@pytest.mark.parametrize("name", NAMES)
def test_beams_sequences_and_a_second_turn_equal_the_model(name: str) -> None:
    """Beams, several sequences and a second turn, as with transformers' cache."""
    model, ids = model_of(name), torch.tensor([ROWS[0]])
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        modes = {**GREEDY, "max_new_tokens": 5, **options}
        expected = model.generate(ids, **modes)
        with larder.applied(model, policy="full"):
            assert torch.equal(model.generate(ids, **modes), expected)
    cached = LarderCache(model, "full")
    first = model.generate(ids, past_key_values=cached, max_new_tokens=4, **GREEDY)
    longer = torch.cat([first, torch.tensor([ROWS[1]])], 1)
    expected = model.generate(longer, max_new_tokens=4, **GREEDY)
    assert torch.equal(
        model.generate(longer, past_key_values=cached, max_new_tokens=4, **GREEDY), expected
    )


@pytest.mark.parametrize("after", [0, 2])
@torch.no_grad()
def test_failed_turn_is_undone(after: int) -> None:
    """The first call of the last layer fails, or one behind two blocks of the text."""
    model = model_of("LFM2")
    cached = LarderCache(model, "blockwise(tokens=4) > protect(sinks=2, recent=4) > keydiff()", 99)
    model(torch.tensor([ROWS[0]]), past_key_values=cached)
    other, calls = cached.fork(), list[int]()

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError

    handle = model.model.layers[-1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(torch.tensor([ROWS[2]]), past_key_values=cached)
    handle.remove()
    got, expected = (
        model(torch.tensor([ROWS[2]]), past_key_values=own).logits for own in (cached, other)
    )
    assert torch.equal(got, expected)


def test_operations_needing_an_earlier_recurrent_state_are_refused() -> None:
    model, ids = model_of("LFM2"), torch.tensor([ROWS[0]])
    cached = LarderCache(model, "full")
    with pytest.raises(UsageError, match="leave the assistant out"):
        cached.activate_past_recording()
    assert not cached.is_croppable
    tokens(model, ids, cached, max_new_tokens=3)
    with pytest.raises(CacheError, match="recurrent layers hold a state"):
        cached.crop(-1)
    with pytest.raises(CacheError, match="of recurrent layers: continue with the LarderCache"):
        cached.to_dynamic_cache()
    own = model(ids, use_cache=True).past_key_values
    with pytest.raises(CacheError, match="without recurrent layers"):
        LarderCache.from_dynamic_cache(model, own, "full")


def test_bytes_of_states_are_counted() -> None:
    model = model_of("Falcon-H1")
    cached = LarderCache(model, "full")
    ids, mask = padded(ROWS)
    tokens(model, ids, cached, attention_mask=mask, max_new_tokens=3)
    each = cached.attachment.decoder.spec.recurrent_bytes
    assert [own.recurrent.nbytes for own in cached.sequences] == [each] * 3
    assert cached.nbytes > 3 * each
