"""Read something under a policy so that it takes a wanted size, and tell what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from larder.bench.amounts import Matched
from larder.bench.rows import Row
from larder.bench.sizing import Fit, fit
from larder.core.amount import Amount
from larder.core.spec import ModelSpec
from larder.session.memory import Figures, Memory


@dataclass(frozen=True)
class Wanted:
    """A size that a policy is given.

    Args:
        amount: as the study writes it.
        matched: what the amount is of.
        context_tokens: of what is read.
    """

    amount: Amount
    matched: Matched
    context_tokens: int
    spec: ModelSpec

    def read(self, read: Callable[[int], Memory], tokens_per_byte: float | None) -> Fit[Memory]:
        """What was read at that size, and the budget in tokens that gave it.

        Args:
            read: reads under a budget in tokens per kv head.
            tokens_per_byte: what an earlier reading under the same policy came to, for a good first
                guess; None to count keys and values alone.

        Raises:
            LarderError: the policy refuses every budget that is small enough.
        """
        if self.matched is Matched.TOKENS:
            tokens = self.tokens
            return Fit(tokens, read(tokens), 1)
        wanted = self.nbytes
        plain = self.context_tokens / self.spec.full_bytes(self.context_tokens)
        guess = plain if tokens_per_byte is None else tokens_per_byte
        sized = taken_bytes(self.matched)
        return fit(
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


def taken_bytes(matched: Matched) -> Callable[[Figures], int]:
    """Which of the bytes of what was read are held equal."""
    if matched is Matched.TOTAL:
        return lambda figures: figures.kv_bytes
    return lambda figures: figures.active_kv_bytes


def dense_figures(figures: Figures) -> Row:
    """What a line tells of layers that the budget does not cover; nothing where there are none."""
    if not figures.dense:
        return {}
    return {
        "dense_layers": [each.layer for each in figures.dense],
        "dense_kv_bytes": figures.dense_kv_bytes,
    }


def figures_of(figures: Figures) -> Row:
    """What a line tells of the caches."""
    return {
        "context_tokens": figures.context_tokens,
        "budget_tokens": figures.budget_tokens,
        "bytes_share": round(figures.active_kv_bytes / figures.full_kv_bytes, 5),
        "active_kv_bytes": figures.active_kv_bytes,
        **dense_figures(figures),
        "kv_bytes": figures.kv_bytes,
        "peak_kv_bytes": figures.peak_kv_bytes,
        "full_kv_bytes": figures.full_kv_bytes,
        "prefill_seconds": round(figures.prefill_seconds, 3),
    }
