"""Inputs that are kept for the tiers read last: the right ones, not too many, and nothing alive."""

from __future__ import annotations

from weakref import ref

import torch

from larder.cache import MOST_TIERS, KernelInputs, kernel_inputs


def some_inputs(length: int) -> KernelInputs:
    none = torch.zeros(0)
    return KernelInputs(none.long()[None], none[None, None], none.int()[None], length)


def tensors(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(count)]


def test_inputs_are_made_once_for_the_same_tensors_and_step() -> None:
    own = tensors()
    first = kernel_inputs(own, 0.5, lambda: some_inputs(1))
    assert kernel_inputs(own, 0.5, lambda: some_inputs(2)) is first
    assert kernel_inputs(own, 0.25, lambda: some_inputs(3)).length == 3
    other = [own[0], torch.zeros(3)]
    assert kernel_inputs(other, 0.25, lambda: some_inputs(4)).length == 4
    assert kernel_inputs(other, 0.25, lambda: some_inputs(5)).length == 4


def test_kernel_inputs_do_not_keep_their_tier_alive() -> None:
    for number in range(50):  # some get the address of one that was freed
        own = tensors()
        assert kernel_inputs(own, 0.5, lambda number=number: some_inputs(number)).length == number
        held = ref(own[0])
        del own
        assert held() is None


def test_least_recent_kernel_inputs_are_evicted() -> None:
    many = [tensors() for _ in range(MOST_TIERS + 1)]
    for own in many:
        kernel_inputs(own, 0.5, lambda: some_inputs(0))
    assert kernel_inputs(many[-1], 0.5, lambda: some_inputs(1)).length == 0
    assert kernel_inputs(many[0], 0.5, lambda: some_inputs(1)).length == 1
