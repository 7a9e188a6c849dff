"""What every scorer can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.ledger import Ledger
from larder.core.observation import Entries, Need, Observation, Prompts, ScratchPrompt
from larder.core.types import Packed, PackedMask
from larder.policy.attention_reduction import AttentionReduction, ObservationWindow
from larder.policy.protect import ProtectedTokens


class Scorer(ABC):
    """One published answer to the question: which cached entries will be needed again?

    A scorer is a frozen dataclass. It judges one layer at a time and keeps no state.
    """

    ledger: ClassVar[Ledger] = Ledger()  # what it has the cache remember
    # Names of the prompts that must be in the prompt book before reading starts.
    prompts: ClassVar[frozenset[str]] = frozenset()
    # Names of the tallies whose columns it reads.
    tallies: ClassVar[frozenset[str]] = frozenset()

    def queries(self) -> int:
        """How many of the latest queries of each layer it has the cache hold; none by default."""
        return 0

    @abstractmethod
    def score(self, seen: Observation) -> Packed:
        """A float32 score for every cached entry, packed over heads; higher stays longer."""

    def judge(self, seen: Observation, joining: AttentionReduction) -> Tensor:
        """`score`, where a scorer by attention joins queries and heads as the policy says."""
        del joining
        return self.score(seen)

    def weights(self, seen: Observation) -> Packed:
        """Mean attention weight of each entry, for scorers by attention.

        Over the queries that it judges by and the query heads of a group; what is judged by its
        position, such as a window of the latest, is among them.
        """
        raise NotImplementedError(f"{type(self).__name__} looks at no attention.")

    def default_reduction(self) -> tuple[str, str] | None:
        """The aggregation and head rule of its paper; None where it looks at no attention."""
        return None

    def scratch(
        self, block: tuple[int, ...], start: int, book: Prompts
    ) -> tuple[ScratchPrompt, ...]:
        """Token sequences to read behind the cache before judging, after a block was read.

        None by default: the block's own pass is judged.

        Args:
            block: token ids just read.
            start: the true position of the first of them.
            book: prompts by name, as token ids.
        """
        del block, start, book
        return ()

    def under(self, tokens: int) -> Scorer:
        """The same under a budget of `tokens` entries per kv head."""
        del tokens
        return self

    def least(self) -> ProtectedTokens:
        """Tokens that this scorer puts above all others, such as its own window.

        A budget that cannot hold them beside what is protected is refused. A scorer that judges by
        the latest tokens judges by no more than these.
        """
        return ProtectedTokens()

    def needs(self) -> frozenset[Need]:
        """What it has to see beside queries, keys and entries; nothing by default."""
        return frozenset()

    def wanted(self) -> frozenset[str]:
        """Names of the prompts that this scorer, with these parameters, will look up."""
        return self.prompts


class AttentionScorer(Scorer):
    """A scorer by attention: it says which queries look, and what it makes of their weights.

    How queries and heads are joined is the policy's word (slots `aggregation` and `heads`); left
    out, it is the paper's.
    """

    @abstractmethod
    def default_reduction(self) -> tuple[str, str]:
        """Names of the aggregation and of the head rule that its paper takes."""

    @abstractmethod
    def look(self, seen: Observation) -> ObservationWindow:
        """The queries that vote, and the entries that they vote on."""

    def finish(self, seen: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        """Scores of all entries from the joined weights of those looked at; end to end here."""
        del seen
        return torch.cat(heads)

    def score(self, seen: Observation) -> Packed:
        return self.judge(seen, self._own_joining)

    def judge(self, seen: Observation, joining: AttentionReduction) -> Packed:
        return self.finish(seen, joining.reduce(self.look(seen), seen))

    def weights(self, seen: Observation) -> Packed:
        return torch.cat(self._plain_joining.reduce(self.look(seen), seen))

    @cached_property
    def _plain_joining(self) -> AttentionReduction:
        return AttentionReduction.from_names("mean", "group_mean")

    @cached_property
    def _own_joining(self) -> AttentionReduction:
        return AttentionReduction.from_names(*self.default_reduction())


def with_pass_keys(seen: Observation, entries: Entries) -> Entries:
    """Entries with the pass's own tokens behind those of every head, as plain attention sees them.

    Their values are zeros, and nothing is remembered of them: each stands for itself.
    """
    heads = range(seen.layer.kv_heads)
    own = list(torch.unbind(seen.keys.to(entries.keys.dtype)))
    ahead = seen.query_positions.to(entries.positions.dtype)
    fresh = torch.zeros(len(ahead), device=ahead.device)
    return _packed_entries(
        [torch.cat([entries.head_keys(h), own[h]]) for h in heads],
        [torch.cat([entries.head_positions(h), ahead]) for h in heads],
        {
            name: [torch.cat([column[entries.rows(h)], fresh]) for h in heads]
            for name, column in entries.columns.items()
        },
    )


def select_keys(seen: Observation, marked: PackedMask) -> Entries:
    """The entries that a packed mask marks; their values are zeros."""
    marks = torch.split(marked, list(seen.entries.lengths))
    heads = range(seen.layer.kv_heads)
    return _packed_entries(
        [seen.entries.head_keys(h)[marks[h]] for h in heads],
        [seen.entries.head_positions(h)[marks[h]] for h in heads],
        {
            name: [column[seen.entries.rows(h)][marks[h]] for h in heads]
            for name, column in seen.entries.columns.items()
        },
    )


def _packed_entries(
    keys: list[Tensor], positions: list[Tensor], columns: Mapping[str, list[Tensor]]
) -> Entries:
    lengths = tuple(len(head) for head in keys)
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    together = torch.cat(keys)
    nothing = together.new_zeros(1, 1).expand(together.shape)
    remembered = {name: torch.cat(heads) for name, heads in columns.items()}
    return Entries(together, nothing, torch.cat(positions), starts, lengths, remembered)
