"""Calls that are kept for the tiers read last: the right ones, not too many, and nothing alive."""

from __future__ import annotations

from weakref import ref

import torch

from larder.cache import MOST_TIERS, cached_call
from larder.ops.cpu import transform_attention

OPTIONS = (0.5, torch.bfloat16, None)


def some_call(blocks: int) -> transform_attention.CodedEntriesCall:
    fields = transform_attention.TransformAttentionCall(num_blocks=blocks)
    return transform_attention.CodedEntriesCall(fields, ())


def kept_blocks(own: list[torch.Tensor], options: tuple[object, ...], blocks: int) -> int:
    """Blocks of the call that is kept, or of a new one with so many."""
    return cached_call(own, options, lambda: some_call(blocks)).fields.num_blocks


def tensors(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(count)]


def test_call_is_made_once_for_the_same_tensors_and_options() -> None:
    own = tensors()
    first = cached_call(own, OPTIONS, lambda: some_call(1))
    assert cached_call(own, OPTIONS, lambda: some_call(2)) is first
    assert kept_blocks(own, (0.25, *OPTIONS[1:]), 3) == 3
    assert kept_blocks(own, (0.25, torch.float32, None), 4) == 4
    assert kept_blocks(own, (0.25, torch.float32, 0), 5) == 5
    other = [own[0], torch.zeros(3)]
    assert kept_blocks(other, (0.25, torch.float32, 0), 6) == 6
    assert kept_blocks(other, (0.25, torch.float32, 0), 7) == 6


def test_kept_calls_do_not_keep_their_tier_alive() -> None:
    for number in range(50):  # some get the address of one that was freed
        own = tensors()
        assert kept_blocks(own, OPTIONS, number) == number
        held = ref(own[0])
        del own
        assert held() is None


def test_least_recent_calls_are_evicted() -> None:
    many = [tensors() for _ in range(MOST_TIERS + 1)]
    for own in many:
        kept_blocks(own, OPTIONS, 0)
    assert kept_blocks(many[-1], OPTIONS, 1) == 0
    assert kept_blocks(many[0], OPTIONS, 1) == 1
