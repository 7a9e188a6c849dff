"""What is compared in a study: policies, and controls that show what a policy is worth.

full            the whole cache
random          entries by chance
oracle          the exact question as the prompt that entries are judged by, read anew for each
                question: one must know the question first, so this is a bound and no method
exact_topk      pages parked and found again by exact search
rag_2k          text that is like the question, read in the place of a cache
rag_episodic    the same out of the question's episode
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum

from larder.bench.amounts import OWN, WHOLE, Matched
from larder.bench.cases import Case, case
from larder.bench.retrievals.base import Retrieval
from larder.bench.study import CONTROLS
from larder.bench.workbench import Workbench
from larder.core.conversation import Conversation, Question
from larder.core.errors import SpellingError, UnknownName
from larder.core.family import Family, unknown
from larder.core.spelling import build, parse, spell
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.session.memory import Memory

RETRIEVALS = Family("retrieval", "larder.bench.retrievals")
ORACLE = "oracle"
ORACLE_POLICY = "exact_question"
TOPK = "exact_topk"
TOPK_POLICY = (
    "blockwise() > protect(sinks=4, recent=32) > sinks_and_window() > uniform() > park() > "
    "flat(dense=0) > lagged(tokens=16)"
)


class Scope(Enum):
    """What is read serves which questions.

    CONTEXT: all of them; nothing of them is known before.
    FIRST: all that share a context, but it is read with the first in mind.
    EACH: one; it is read anew for the next.
    """

    CONTEXT = "context"
    FIRST = "first"
    EACH = "each"


class Subject(ABC):
    """Something that reads a conversation within a budget.

    Args:
        name: what tables call it.
    """

    name: str

    @property
    @abstractmethod
    def spelling(self) -> str:
        """As it is written in full."""

    @property
    @abstractmethod
    def scope(self) -> Scope:
        """Which questions one reading is for."""

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        """Those of a study that it is run at."""
        return wanted

    def matched(self, wanted: Matched) -> Matched:
        """What is held equal; what a study says, where nothing is known that comes to the same."""
        return wanted

    @abstractmethod
    def read(
        self, bench: Workbench, conversation: Conversation, tokens: int | None, question: Question
    ) -> Memory:
        """Read under a budget in tokens per kv head; None where there is nothing to choose."""


@dataclass(frozen=True)
class Governed(Subject):
    """A policy.

    Args:
        rereads: when a policy that must know its question reads anew.
    """

    case: Case
    rereads: Scope = Scope.FIRST

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ORACLE if self.rereads is Scope.EACH else self.case.name

    @property
    def spelling(self) -> str:
        shown = str(self.case.policy)
        return f"{ORACLE}: {shown}" if self.rereads is Scope.EACH else shown

    @property
    def scope(self) -> Scope:
        return self.rereads if self.case.asks_first else Scope.CONTEXT

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        budget = self.case.policy.budget
        if budget.tokens == WITHOUT_LIMIT:
            return (WHOLE,)
        return wanted if budget.tokens is None and budget.kept is None else (OWN,)

    def read(
        self, bench: Workbench, conversation: Conversation, tokens: int | None, question: Question
    ) -> Memory:
        under = bench.engine.under(self.case.policy, None if tokens is None else str(tokens))
        prompts = {"question": question.question} if self.case.asks_first else {}
        return under.read(conversation, prompts)


@dataclass(frozen=True)
class Retrieved(Subject):
    """Text that is looked up for each question, under the full cache."""

    name: str
    retrieval: Retrieval

    @property
    def spelling(self) -> str:
        return spell(self.retrieval)

    @property
    def scope(self) -> Scope:
        return Scope.EACH

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        return wanted if self.retrieval.tokens is None else (OWN,)

    def matched(self, wanted: Matched) -> Matched:
        """Tokens: what is read is held in full, and a budget filled as far as segments fit."""
        del wanted
        return Matched.TOKENS

    def read(
        self, bench: Workbench, conversation: Conversation, tokens: int | None, question: Question
    ) -> Memory:
        room = self.retrieval.tokens if tokens is None else tokens
        assert room is not None  # a budget, where the spelling has none
        kind = self.retrieval.embedder, self.retrieval.segment
        passages = bench.passages(conversation, *kind)
        made = passages.fitting(self.retrieval.ranked(passages, question.question), room)
        memory = bench.engine.under("full").read(made)
        context = len(bench.engine.scribe.write(conversation).ids)
        full = bench.engine.loaded.decoder.spec.full_bytes(context)
        told = {"context_tokens": context, "full_kv_bytes": full, "budget_tokens": room}
        return replace(memory, figures=replace(memory.figures, **told))


def control(name: str) -> Subject:
    """The control of that name; else as `subject`.

    Raises:
        UnknownName: it is nothing, but like one of the controls; else as `subject`.
    """
    if name == ORACLE:
        return Governed(case(ORACLE_POLICY), Scope.EACH)
    if name == TOPK:
        return Governed(Case(TOPK, case(TOPK_POLICY).policy))
    try:
        return subject(name)
    except UnknownName:
        if name.isidentifier() and get_close_matches(name, CONTROLS):
            raise UnknownName(unknown("control", name, list(CONTROLS))) from None
        raise


def subject(name: str) -> Subject:
    """The policy or the way to retrieve of that name, or that is spelled so.

    Raises:
        LarderError: it is neither.
    """
    base = name.partition("(")[0].strip()
    if base in RETRIEVALS.own():
        calls = parse(name)
        if len(calls) != 1:
            raise SpellingError(
                f"{name!r} reads text in the place of a cache, so nothing can stand behind it."
            )
        return Retrieved(name, build(RETRIEVALS.load(base), calls[0].parameters))
    return Governed(case(name))
