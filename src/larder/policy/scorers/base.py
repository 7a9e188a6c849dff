"""What every scorer can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from larder.core.ledger import Ledger
from larder.core.needs import Need
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import Packed
from larder.policy.attention_reduction import AttentionReduction
from larder.policy.ends import ProtectedTokens


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

    def published(self) -> tuple[str, str] | None:
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
