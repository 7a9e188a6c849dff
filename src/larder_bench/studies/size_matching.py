"""Read something under a policy so that it takes a wanted size, and tell what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from larder.core.errors import BudgetError
from larder.core.memory_budget import MemoryBudget
from larder.core.spec import ModelSpec
from larder.session.memory import CacheFigures, ConversationMemory
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import Row


@dataclass(frozen=True)
class TargetSize:
    """A size that a policy is given.

    Args:
        amount: as the study writes it.
        matched: what the amount is of.
        context_tokens: of what is read.
    """

    amount: MemoryBudget
    matched: MatchedQuantity
    context_tokens: int
    spec: ModelSpec

    def read(
        self, read: Callable[[int], ConversationMemory], tokens_per_byte: float | None
    ) -> BudgetFit[ConversationMemory]:
        """What was read at that size, and the budget in tokens that gave it.

        Args:
            read: reads under a budget in tokens per kv head.
            tokens_per_byte: what an earlier reading under the same policy came to, for a good first
                guess; None to count keys and values alone.

        Raises:
            LarderError: the policy refuses every budget that is small enough.
        """
        if self.matched is MatchedQuantity.TOKENS:
            tokens = self.tokens
            return BudgetFit(tokens, read(tokens), 1)
        wanted = self.nbytes
        plain = self.context_tokens / self.spec.full_bytes(self.context_tokens)
        guess = plain if tokens_per_byte is None else tokens_per_byte
        sized = matched_bytes(self.matched)
        return search_budget(
            read,
            lambda memory: sized(memory.figures),
            wanted,
            int(guess * wanted * 0.99),
            self.context_tokens,
        )

    @property
    def tokens(self) -> int:
        """Entries per kv head, where keys and values alone count."""
        return self.amount.tokens(self.context_tokens, self.spec.managed_bytes_per_token())

    @property
    def nbytes(self) -> int:
        """Bytes, where everything counts."""
        full = self.spec.full_bytes(self.context_tokens)
        return self.amount.bytes(full, self.spec.managed_bytes_per_token())


def matched_bytes(matched: MatchedQuantity) -> Callable[[CacheFigures], int]:
    """Which of the bytes of what was read are held equal."""
    if matched is MatchedQuantity.TOTAL:
        return lambda figures: figures.kv_bytes
    return lambda figures: figures.active_kv_bytes


def dense_row_fields(figures: CacheFigures) -> Row:
    """What a line tells of layers that the budget does not cover; nothing where there are none."""
    if not figures.dense:
        return {}
    return {
        "dense_layers": [each.layer for each in figures.dense],
        "dense_kv_bytes": figures.dense_kv_bytes,
    }


def row_figures(figures: CacheFigures) -> Row:
    """What a line tells of the caches."""
    return {
        "context_tokens": figures.context_tokens,
        "budget_tokens": figures.budget_tokens,
        "bytes_share": round(figures.active_kv_bytes / figures.full_kv_bytes, 5),
        "active_kv_bytes": figures.active_kv_bytes,
        **dense_row_fields(figures),
        "kv_bytes": figures.kv_bytes,
        "peak_kv_bytes": figures.peak_kv_bytes,
        "full_kv_bytes": figures.full_kv_bytes,
        "prefill_seconds": round(figures.prefill_seconds, 3),
    }


Made = TypeVar("Made")
TOLERANCE = 0.02  # of the wanted bytes may be missing
TRIES = 20
GUESSES = 4  # tries by proportion, which soon hits; halving what is left always ends


@dataclass(frozen=True)
class BudgetFit(Generic[Made]):
    """The largest budget found, what was made under it, and how often anything was made."""

    tokens: int
    made: Made
    tries: int


def search_budget(
    make: Callable[[int], Made],
    bytes_of: Callable[[Made], int],
    wanted_bytes: int,
    first_tokens: int,
    most_tokens: int,
) -> BudgetFit[Made]:
    """Make something of at most `wanted_bytes`, and of little less where a budget gives that.

    Args:
        make: what a budget in tokens gives; more tokens should give no fewer bytes.
        first_tokens: the first guess.
        most_tokens: the largest budget that makes sense.

    Raises:
        BudgetError: every budget tried that is small enough was refused, or none is small enough.
    """
    best: BudgetFit[Made] | None = None
    low, high, tokens = 0, most_tokens + 1, min(max(1, first_tokens), most_tokens)
    refusal = BudgetError(f"No budget in tokens gives {wanted_bytes} bytes or less.")
    for tries in range(1, TRIES + 1):
        guess = 2 * tokens
        try:
            made = make(tokens)
        except BudgetError as error:
            refusal, low = error, tokens
        else:
            nbytes = bytes_of(made)
            guess = tokens * wanted_bytes // max(1, nbytes)
            if nbytes <= wanted_bytes:
                best, low = BudgetFit(tokens, made, tries), tokens
                if nbytes >= (1 - TOLERANCE) * wanted_bytes:
                    return best
            else:
                high = tokens
        if high - low <= 1:
            break
        guess = guess if tries < GUESSES else (low + high) // 2
        tokens = min(max(guess, low + 1), high - 1)
    if best is None:
        raise refusal
    return BudgetFit(best.tokens, best.made, tries)
