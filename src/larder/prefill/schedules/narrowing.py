"""Prefill in which, behind one layer, the most attended tokens alone go deeper (FastKV).

Jo et al., "FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding
Acceleration" (2025), arXiv:2502.01068, token-selective propagation. The first layers read the whole
text. Behind the layer named here tokens are chosen by its scores, added over kv heads, and the
hidden states of the others leave: deeper layers compute, and can hold, the chosen tokens alone, at
their true positions. As in the released code the layer itself still holds what its own budget
keeps of all tokens, layer 15 of 32 chooses, and the tokens that vote are selected.

Two modes of the released code are two ways to say how many: `tokens` (2048 there, beside a fixed
capacity per layer) and `kept`, a share of the text (proportional; there layers behind the choice
keep `rate / kept` of what reaches them, which is what the same budget for all layers gives).

Differences: never fewer tokens are selected than the budget lets a deeper layer hold, so that no
budget is unused and one that holds the whole text is exact; under `unlimited()` the numbers given
here alone decide. The whole text is one pass, whose activations are in memory at once. What is read
later, such as the next turn of a chat, goes through all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.types import TokenIds
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._token_choice import (
    NarrowingSchedule,
    TokenChoice,
    largest_quota,
    layer_index,
    scoring_of,
    scoring_reader,
)

KEPT = 0.25  # of a text, where neither `tokens` nor `kept` is given


@dataclass(frozen=True)
class Narrowing(NarrowingSchedule):
    """Prefill with one plan, in which few tokens go through the deeper layers.

    Args:
        layer: the layer behind which tokens are chosen: its index, or its depth as a fraction of
            all layers. Where it slides a window, the nearest one before it that does not.
        tokens: tokens that go deeper.
        kept: the same as a fraction of the text; left open with `tokens`, a quarter.
        scorer: what chooses, with an aggregation and a head rule behind it if its paper's are not
            wanted; left open, the scorer of the policy.
    """

    layer: int | float = 0.5
    tokens: int | None = None
    kept: float | None = None
    scorer: str | None = None

    def __post_init__(self) -> None:
        check_layer("narrowing", self.layer)
        check_counts("narrowing", self.tokens, self.kept)
        scoring_of("narrowing", self.scorer)

    def read_steps(
        self, reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds
    ) -> Iterator[None]:
        layer = layer_index(self.layer, reader.decoder.spec)
        count = max(self._count(len(ids)), largest_quota(reader, layer + 1))
        reader = scoring_reader(reader)
        choice = TokenChoice(
            reader.planner,
            reader.tokens,
            frozenset({layer}),
            lambda _layer, _reached: count,
            self.scoring,
        )
        yield from reader.read_narrowing_steps(sequence, ids, choice.before, choice.observe)

    def _count(self, num_tokens: int) -> int:
        """Tokens of a text that go deeper."""
        if self.tokens is not None:
            return self.tokens
        return int(num_tokens * (KEPT if self.kept is None else self.kept))


Part = Narrowing


def check_layer(part: str, layer: int | float) -> None:
    """Raise BadParameter unless a layer is an index, or a depth in (0, 1)."""
    is_depth = isinstance(layer, float)
    if not (0 < layer < 1 if is_depth else layer >= 0):
        raise BadParameter(
            f"{part}.layer must be the index of a layer (0 or more) or a depth between 0 and 1, "
            f"got {layer}."
        )


def check_counts(part: str, tokens: int | None, fraction: float | None) -> None:
    """Raise BadParameter unless some tokens are selected, by number or by share."""
    if tokens is not None and fraction is not None:
        raise BadParameter(f"{part} was given tokens={tokens} and kept={fraction}: give one.")
    require(tokens is None or tokens >= 1, f"{part}.tokens", "at least 1", tokens)
    require(fraction is None or 0 < fraction <= 1, f"{part}.kept", "a fraction in (0, 1]", fraction)
