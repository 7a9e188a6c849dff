"""Prefill at a matched size, and the figures of its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from larder.core import BudgetError, MemoryBudget, ModelSpec
from larder.session import CacheFigures, ConversationMemory
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import Row

TOLERANCE = 0.02  # share of the wanted bytes that may be missing
TRIES = 20
GUESSES = 4  # proportional steps, which converge fast; bisection afterwards always terminates


@dataclass(frozen=True)
class TargetSize:
    """Size that a policy's caches are to have.

    Args:
        amount: budget of the study.
        matched: quantity that the amount refers to.
        context_tokens: length of the context.
    """

    amount: MemoryBudget
    matched: MatchedQuantity
    context_tokens: int
    spec: ModelSpec

    def read(
        self, read: Callable[[int], ConversationMemory], tokens_per_byte: float | None
    ) -> BudgetFit[ConversationMemory]:
        """Memory at that size, and the budget in tokens that gives it.

        Args:
            read: prefills with a budget in tokens per kv head.
            tokens_per_byte: result of an earlier prefill with the same policy, for the first guess;
                None to count keys and values only.

        Raises:
            LarderError: the policy refuses every budget that is small enough.
        """
        if self.matched is MatchedQuantity.TOKENS:
            tokens = self.tokens
            return BudgetFit(tokens, read(tokens), 1)

        wanted_bytes = self.nbytes
        plain = self.context_tokens / self.spec.full_bytes(self.context_tokens)
        guess = plain if tokens_per_byte is None else tokens_per_byte
        sized = matched_bytes(self.matched)
        return search_budget(
            read,
            lambda memory: sized(memory.figures),
            wanted_bytes,
            int(guess * wanted_bytes * 0.99),
            self.context_tokens,
        )

    @property
    def tokens(self) -> int:
        """Entries per kv head if only keys and values count."""
        return self.amount.tokens(self.context_tokens, self.spec.managed_bytes_per_token())

    @property
    def nbytes(self) -> int:
        """Bytes of the budget, everything included."""
        full = self.spec.full_bytes(self.context_tokens)
        return self.amount.bytes(full, self.spec.managed_bytes_per_token())


def matched_bytes(matched: MatchedQuantity) -> Callable[[CacheFigures], int]:
    """Function that returns the matched bytes of a memory's figures."""
    if matched is MatchedQuantity.TOTAL:
        return lambda figures: figures.kv_bytes
    return lambda figures: figures.active_kv_bytes


def dense_row_fields(figures: CacheFigures) -> Row:
    """Fields of a row about layers that the budget does not cover; empty without any."""
    if not figures.dense:
        return {}
    return {
        "dense_layers": [each.layer for each in figures.dense],
        "dense_kv_bytes": figures.dense_kv_bytes,
    }


def row_figures(figures: CacheFigures) -> Row:
    """Fields of a row about the caches."""
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


Result = TypeVar("Result")


@dataclass(frozen=True)
class BudgetFit(Generic[Result]):
    """Largest budget found, its result, and the number of tries."""

    tokens: int
    result: Result
    tries: int


def search_budget(
    make: Callable[[int], Result],
    bytes_of: Callable[[Result], int],
    wanted_bytes: int,
    first_tokens: int,
    most_tokens: int,
) -> BudgetFit[Result]:
    """Find the largest budget whose result takes at most `wanted_bytes`, within a tolerance.

    Args:
        make: returns the result of a budget in tokens; more tokens should give no fewer bytes.
        first_tokens: first guess.
        most_tokens: largest meaningful budget.

    Raises:
        BudgetError: every budget tried that is small enough was refused, or none is small enough.
    """
    best: BudgetFit[Result] | None = None
    low, high, tokens = 0, most_tokens + 1, min(max(1, first_tokens), most_tokens)
    refusal = BudgetError(f"No budget in tokens gives {wanted_bytes} bytes or less.")
    for tries in range(1, TRIES + 1):
        guess = 2 * tokens
        try:
            result = make(tokens)
        except BudgetError as error:
            refusal, low = error, tokens
        else:
            nbytes = bytes_of(result)
            guess = tokens * wanted_bytes // max(1, nbytes)
            if nbytes <= wanted_bytes:
                best, low = BudgetFit(tokens, result, tries), tokens
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
    return BudgetFit(best.tokens, best.result, tries)
