"""Attention that computes its weights again for gradients, against autograd through a loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from larder.ops import EarlierEntries, attend_with_gradients, attention_gradient

HEADS, QUERIES, EARLIER, WIDTH, VALUE_WIDTH = 3, 5, 11, 8, 6
START = 40  # true position of the first new token


def loop(queries: Tensor, keys: Tensor, values: Tensor, earlier: EarlierEntries) -> Tensor:
    """Attention of one query head and token at a time over the entries that it sees."""
    places = [*earlier.positions.tolist(), *earlier.query_positions.tolist()]
    every_key, every_value = torch.cat([earlier.keys, keys]), torch.cat([earlier.values, values])
    out = []
    for head in range(len(queries)):
        for row, here in enumerate(earlier.query_positions.tolist()):
            first = int(earlier.first_visible[row])
            seen = [index for index, place in enumerate(places) if first <= place <= here]
            logits = []
            for index in seen:
                logit = (queries[head, row] * every_key[index]).sum() * earlier.scaling
                if earlier.softcap is not None:
                    logit = earlier.softcap * torch.tanh(logit / earlier.softcap)
                if earlier.bias is not None and index < len(earlier.keys):
                    logit = logit + earlier.bias[index]
                logits.append(logit)
            numbers = [logit.exp() for logit in logits]
            total = sum(numbers)
            if len(earlier.sinks):
                total = total + earlier.sinks[head].exp()
            weighed = [n / total * every_value[i] for n, i in zip(numbers, seen, strict=True)]
            out.append(torch.stack(weighed).sum(0))
    return torch.stack(out).unflatten(0, (len(queries), -1))


@pytest.fixture
def earlier() -> EarlierEntries:
    random = torch.Generator().manual_seed(0)
    positions = torch.arange(START, START + QUERIES)
    return EarlierEntries(
        torch.randn(EARLIER, WIDTH, generator=random),
        torch.randn(EARLIER, VALUE_WIDTH, generator=random),
        torch.randperm(START, generator=random)[:EARLIER],
        positions,
        0 * positions,
        1 / math.sqrt(WIDTH),
        None,
        torch.empty(0),
    )


def new_tokens() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = (HEADS, QUERIES, WIDTH), (QUERIES, WIDTH), (QUERIES, VALUE_WIDTH)
    drawn = [torch.randn(shape, generator=random).requires_grad_(True) for shape in shapes]
    return drawn[0], drawn[1], drawn[2]


def output_and_gradients(attend, earlier: EarlierEntries) -> list[Tensor]:
    tokens = new_tokens()
    out = attend(*tokens, earlier)
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad((out * wanted).sum(), tokens)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softcap": 1.5},
        {"sinks": torch.tensor([0.3, -1.0, 2.0])},
        {"bias": torch.linspace(-1, 1, EARLIER)},
        {"first_visible": torch.arange(START, START + QUERIES) - 9},
        {
            "softcap": 2.0,
            "sinks": torch.tensor([0.5, 0.0, -2.0]),
            "bias": torch.linspace(1, -1, EARLIER),
            "first_visible": torch.arange(START, START + QUERIES) - 20,
        },
    ],
    ids=["plain", "softcap", "sinks", "bias", "window", "together"],
)
@pytest.mark.parametrize("most", [1, 100, 1 << 19], ids=["row", "rows", "whole"])
def test_equals_a_loop(earlier, changes, most, monkeypatch) -> None:
    monkeypatch.setattr(attention_gradient, "MOST_LOGITS", most)
    earlier = replace(earlier, **changes)
    got = output_and_gradients(attend_with_gradients, earlier)
    for own, expected in zip(got, output_and_gradients(loop, earlier), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_without_earlier_entries(earlier) -> None:
    none = replace(
        earlier,
        keys=earlier.keys[:0],
        values=earlier.values[:0],
        positions=earlier.positions[:0],
    )
    got = output_and_gradients(attend_with_gradients, none)
    for own, expected in zip(got, output_and_gradients(loop, none), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_holds_no_weights_for_the_backward_pass(earlier) -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    tokens = new_tokens()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attend_with_gradients(*tokens, earlier)
    assert sum(map(torch.numel, saved)) == sum(map(torch.numel, (*tokens, out)))
