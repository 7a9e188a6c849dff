"""Compared methods of a study: policies, and controls.

full            the whole cache
random          random entries
oracle          entries scored by the exact question, with a new prefill for each question: it needs
                the question in advance, so it is an upper bound and not a method
exact_topk      offloaded pages recalled by exact search
rag_2k          retrieved text similar to the question, read instead of a cache
rag_episodic    the same within the question's episode
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum

from larder.core import (
    Conversation,
    Family,
    Question,
    SpellingError,
    UnknownName,
    build,
    parse,
    spell,
    unknown_name_message,
)
from larder.policy import WITHOUT_LIMIT
from larder.session import ConversationMemory, Policy, with_searched_recall
from larder_bench.results.budget_labels import OWN, WHOLE, MatchedQuantity
from larder_bench.retrievals.base import RetrievalBaseline
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import CONTROLS

RETRIEVALS = Family("retrieval", "larder_bench.retrievals")
ORACLE = "oracle"
ORACLE_POLICY = "exact_question"
TOPK = "exact_topk"
TOPK_POLICY = (
    "blockwise() > protect(sinks=4, recent=32) > sinks_and_window() > uniform() > park() > "
    "flat(dense=0) > lagged(tokens=16)"
)

# Prompt `task` of policies that keep what a described task looks at.
TASK = "A question about this text follows. Find what it asks for, and repeat it word for word."


class QuestionScope(Enum):
    """Questions that one prefill serves.

    CONTEXT: all questions; the prefill knows none of them.
    FIRST: all questions of a context, but the prefill knows the first one.
    EACH: one question; the next one needs a new prefill.
    """

    CONTEXT = "context"
    FIRST = "first"
    EACH = "each"


class ComparedMethod(ABC):
    """Method that reads a conversation within a budget.

    Args:
        name: name in tables.
    """

    name: str

    @property
    @abstractmethod
    def spelling(self) -> str:
        """Full spelling."""

    @property
    @abstractmethod
    def scope(self) -> QuestionScope:
        """Questions that one prefill serves."""

    def budgets(self, requested: Sequence[str]) -> Sequence[str]:
        """Budgets of a study that the method runs at."""
        return requested

    def matched(self, requested: MatchedQuantity) -> MatchedQuantity:
        """Matched quantity of the method, for the one of a study."""
        return requested

    @abstractmethod
    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        """Read a conversation with a budget in tokens per kv head; None for methods without a
        budget.
        """


@dataclass(frozen=True)
class PolicyMethod(ComparedMethod):
    """Policy as a method of a study.

    Args:
        prefill_scope: questions that one prefill serves, for policies that need a question.
    """

    variant: PolicyVariant
    prefill_scope: QuestionScope = QuestionScope.FIRST

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ORACLE if self.prefill_scope is QuestionScope.EACH else self.variant.name

    @property
    def spelling(self) -> str:
        spelling = str(self.variant.policy)
        return f"{ORACLE}: {spelling}" if self.prefill_scope is QuestionScope.EACH else spelling

    @property
    def scope(self) -> QuestionScope:
        return self.prefill_scope if self.variant.needs_question else QuestionScope.CONTEXT

    def budgets(self, requested: Sequence[str]) -> Sequence[str]:
        budget = self.variant.policy.budget
        if budget.tokens == WITHOUT_LIMIT:
            return (WHOLE,)
        return requested if budget.tokens is None and budget.kept is None else (OWN,)

    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        policy = with_searched_recall(self.variant.policy)
        engine = bench.engine.under(policy, None if tokens is None else str(tokens))
        texts = {"question": question.question, "task": TASK}
        named = policy.scorer.required_prompts()
        return engine.read(conversation, {n: text for n, text in texts.items() if n in named})


@dataclass(frozen=True)
class RetrievalMethod(ComparedMethod):
    """Retrieval of text for each question, read with the full cache."""

    name: str
    retrieval: RetrievalBaseline

    @property
    def spelling(self) -> str:
        return spell(self.retrieval)

    @property
    def scope(self) -> QuestionScope:
        return QuestionScope.EACH

    def budgets(self, requested: Sequence[str]) -> Sequence[str]:
        return requested if self.retrieval.tokens is None else (OWN,)

    def matched(self, requested: MatchedQuantity) -> MatchedQuantity:
        """Tokens: retrieved text is held in full, and a budget is filled with whole segments."""
        return MatchedQuantity.TOKENS

    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        conversation = replace(conversation, inside=None)  # the question selects the text
        limit = self.retrieval.tokens if tokens is None else tokens
        assert limit is not None  # given if the spelling has none
        passages = bench.passages(conversation, self.retrieval.embedder, self.retrieval.segment)
        retrieved = passages.fitting(self.retrieval.ranked(passages, question.question), limit)
        memory = bench.engine.under("full").read(retrieved)
        context = len(bench.engine.tokenizer.encode_conversation(conversation).ids)
        full = bench.engine.loaded.decoder.spec.full_bytes(context)
        figures = replace(
            memory.figures, context_tokens=context, full_kv_bytes=full, budget_tokens=limit
        )
        return replace(memory, figures=figures)


def parse_control(name: str) -> ComparedMethod:
    """Control of a name, or a method, see `parse_method`.

    Raises:
        UnknownName: the name is unknown, but similar to a control; see also `parse_method`.
    """
    if name == ORACLE:
        return PolicyMethod(parse_variant(ORACLE_POLICY), QuestionScope.EACH)
    if name == TOPK:
        return PolicyMethod(PolicyVariant(TOPK, parse_variant(TOPK_POLICY).policy))
    try:
        return parse_method(name)
    except UnknownName:
        if name.isidentifier() and get_close_matches(name, CONTROLS):
            raise UnknownName(unknown_name_message("control", name, list(CONTROLS))) from None
        raise


def parse_method(name: str) -> ComparedMethod:
    """Policy or retrieval of a name or a spelling.

    Raises:
        LarderError: the name is neither.
    """
    base = name.partition("(")[0].strip()
    if base in RETRIEVALS.builtin_names():
        calls = parse(name)
        if len(calls) != 1:
            raise SpellingError(
                f"{name!r} retrieves text instead of a cache, so it takes no other parts."
            )
        return RetrievalMethod(name, build(RETRIEVALS.load(base), calls[0].parameters))
    return PolicyMethod(parse_variant(name))


@dataclass(frozen=True)
class PolicyVariant:
    """Policy without a budget, and its name in tables."""

    name: str
    policy: Policy

    @property
    def needs_question(self) -> bool:
        """Test if it needs the question before prefill."""
        return "question" in self.policy.scorer.required_prompts()

    @property
    def is_full(self) -> bool:
        """Test if it keeps every entry."""
        return self.name == "full"


def parse_variant(name: str) -> PolicyVariant:
    """Policy by the name of tables, such as `h2o:drop`, as it is spelled in rows: with the usual
    numbers of parameters that are not named, whatever was measured of a model.

    Raises:
        UnknownName: the preset or variant does not exist; see also `Policy.parse`.
    """
    return PolicyVariant(name, replace(Policy.parse(name), unnamed=frozenset()))
