"""Softcaps and sinks: attention and the weights that scores are made of equal a loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from column_statistics import columns
from larder.ops import (
    NO_SINKS,
    GroupReduction,
    apply_sinks,
    causal_attention,
    masked_attention,
    merge_attention,
    ragged_attention,
    weights_from_logits,
    windowed_attention,
)
from larder.ops.attention_weights import attention_weights
from references.ops.softmax import capped, shares, sink_of

SCALING, HEADS, GROUP, ROWS, QUERIES, SIZE = 0.6, 2, 2, 9, 4, 8
CASES = {
    "softcap": (1.3, NO_SINKS),
    "sinks": (None, torch.tensor([0.3, -1.0, 2.0, 40.0])),
    "both": (1.3, torch.tensor([0.3, -1.0, 2.0, -40.0])),
}
variants = pytest.mark.parametrize(("softcap", "sinks"), CASES.values(), ids=CASES)


def random(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERIES_OF = random(1, HEADS * GROUP, QUERIES, SIZE)
KEYS, VALUES = random(2, HEADS, ROWS, SIZE), random(3, HEADS, ROWS, SIZE)
BIAS = random(4, HEADS, ROWS)
LAYOUT = torch.tensor([0, ROWS]), torch.tensor([ROWS, ROWS])


def weights(
    softcap: float | None, sinks: Tensor, mask: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Weights [H, Q, S] by the loop; hidden rows have none."""
    out = torch.zeros(HEADS * GROUP, QUERIES, ROWS)
    for h in range(HEADS * GROUP):
        for q in range(QUERIES):
            seen = [s for s in range(ROWS) if mask[q, s]]
            logits = []
            for s in seen:
                product = sum((QUERIES_OF[h, q] * KEYS[h // GROUP, s]).tolist())
                added = 0.0 if bias is None else float(bias[h // GROUP, s])
                logits.append(capped(product * SCALING, softcap) + added)
            if seen:
                out[h, q, seen] = torch.tensor(shares(logits, sink_of(sinks.tolist(), h)))
    return out


def outputs(own: Tensor) -> Tensor:
    return own @ VALUES.repeat_interleave(GROUP, 0)


EVERYTHING = torch.ones(QUERIES, ROWS, dtype=torch.bool)


def parts(softcap: float | None) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows but the latest three, then those, biases included."""
    for rows in (slice(0, 6), slice(6, None)):
        keys, values = (side[:, rows].flatten(0, 1) for side in (KEYS, VALUES))
        count = len(range(ROWS)[rows])
        layout = torch.tensor([0, count]), torch.tensor([count, count])
        bias = BIAS[:, rows].flatten()
        yield ragged_attention(QUERIES_OF, keys, values, *layout, SCALING, bias, softcap=softcap)


@variants
def test_merged_parts_equal_the_reference(softcap: float | None, sinks: Tensor) -> None:
    outs, lses = zip(*parts(softcap), strict=True)
    got = apply_sinks(*merge_attention(outs, lses), sinks)
    torch.testing.assert_close(got, outputs(weights(softcap, sinks, EVERYTHING, BIAS)))


@variants
def test_masked_and_windowed_attention_equal_the_reference(
    softcap: float | None, sinks: Tensor
) -> None:
    """The first query sees nothing, also no sink's value."""
    positions = torch.arange(ROWS)
    asked = torch.tensor([30, 9, 8, 6])
    mask = positions > asked[:, None] - 4
    expected = outputs(weights(softcap, sinks, mask))
    masked = masked_attention(QUERIES_OF, KEYS, VALUES, SCALING, mask, softcap)
    sliding = windowed_attention(QUERIES_OF, asked - 3, KEYS, VALUES, positions, SCALING, softcap)
    for state in (masked, sliding):
        torch.testing.assert_close(apply_sinks(*state, sinks), expected)


@variants
def test_causal_attention_equals_the_reference(softcap: float | None, sinks: Tensor) -> None:
    sides = KEYS[:, :QUERIES], VALUES[:, :QUERIES]
    mask = torch.zeros(QUERIES, ROWS, dtype=torch.bool)
    mask[:, :QUERIES] = torch.ones(QUERIES, QUERIES).tril().bool()
    state = causal_attention(QUERIES_OF, *sides, SCALING, (QUERIES,), None, softcap)
    expected = outputs(weights(softcap, sinks, mask))
    torch.testing.assert_close(apply_sinks(*state, sinks), expected)


@variants
@pytest.mark.parametrize("group", list(GroupReduction))
def test_weights_equal_the_reference(
    softcap: float | None, sinks: Tensor, group: GroupReduction
) -> None:
    flat, bias = KEYS.flatten(0, 1), BIAS.flatten()
    own = weights(softcap, sinks, EVERYTHING, BIAS).sum(1).unflatten(0, (HEADS, GROUP))
    expected = torch.cat([group.join(head) for head in own])
    named = {"bias": bias, "softcap": softcap, "sinks": sinks}
    got = attention_weights(QUERIES_OF, flat, *LAYOUT, SCALING, group=group, **named)
    torch.testing.assert_close(got, expected)


@variants
def test_weights_of_recorded_logits_equal_the_reference(
    softcap: float | None, sinks: Tensor
) -> None:
    sides, bias = (KEYS.flatten(0, 1), VALUES.flatten(0, 1)), BIAS.flatten()
    logits = torch.empty(GROUP, HEADS * ROWS)
    one = QUERIES_OF[:, :1]
    ragged_attention(one, *sides, *LAYOUT, SCALING, bias, logits, softcap)
    got = weights_from_logits(logits, *LAYOUT, GroupReduction.SUM, sinks)
    own = weights(softcap, sinks, EVERYTHING, BIAS)[:, 0].unflatten(0, (HEADS, GROUP))
    torch.testing.assert_close(got, own.sum(1).flatten())


@variants
def test_column_statistics_equal_the_reference(softcap: float | None, sinks: Tensor) -> None:
    positions = torch.arange(ROWS)
    asked = torch.tensor([3, 4, 5, 8])
    got = columns(
        "sum",
        QUERIES_OF,
        KEYS.flatten(0, 1),
        *LAYOUT,
        SCALING,
        group=GroupReduction.MAX,
        query_positions=asked,
        key_positions=positions.repeat(HEADS),
        softcap=softcap,
        sinks=sinks,
    )
    own = weights(softcap, sinks, positions <= asked[:, None]).sum(1)
    torch.testing.assert_close(got, own.unflatten(0, (HEADS, GROUP)).amax(1).flatten())


def test_reference_without_softcap_and_sinks_is_softmax() -> None:
    plain = (QUERIES_OF @ KEYS.repeat_interleave(GROUP, 0).mT * SCALING).softmax(-1)
    torch.testing.assert_close(weights(None, NO_SINKS, EVERYTHING), plain)
    assert not torch.allclose(weights(None, torch.zeros(4), EVERYTHING), plain)
