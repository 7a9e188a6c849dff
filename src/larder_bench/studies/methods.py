"""Compared methods of a study: policies, and controls.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any

from larder.core.conversation import Conversation, Question
from larder.core.errors import SpellingError, UnknownName
from larder.core.family import Family, unknown_name_message
from larder.core.spelling import build, parse, spell
from larder.policy.budgets.pooled import Pooled
from larder.policy.budgets.sensitivity import Sensitivity
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.policy.compensation.drop import Drop
from larder.policy.compensation.fold_ema import FoldEma
from larder.policy.protect import Protect
from larder.policy.storage.exact import Exact
from larder.prefill.schedules.blockwise import Blockwise
from larder.prefill.schedules.whole import Whole
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.presets import PRESETS
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


class QuestionScope(Enum):
    """Questions that one prefill serves.

    CONTEXT: all of them; nothing of them is known before.
    FIRST: all that share a context, but it is read with the first in mind.
    EACH: one; it is read anew for the next.
    """

    CONTEXT = "context"
    FIRST = "first"
    EACH = "each"


class ComparedMethod(ABC):
    """Something that reads a conversation within a budget.

    Args:
        name: what tables call it.
    """

    name: str

    @property
    @abstractmethod
    def spelling(self) -> str:
        """Full spelling."""

    @property
    @abstractmethod
    def scope(self) -> QuestionScope:
        """Which questions one reading is for."""

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        """Budgets of a study that the method runs at."""
        return wanted

    def matched(self, wanted: MatchedQuantity) -> MatchedQuantity:
        """What is held equal; what a study says, where nothing is known that comes to the same."""
        return wanted

    @abstractmethod
    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        """Read under a budget in tokens per kv head; None where there is nothing to choose."""


@dataclass(frozen=True)
class PolicyMethod(ComparedMethod):
    """A policy.

    Args:
        rereads: when a policy that must know its question reads anew.
    """

    variant: PolicyVariant
    rereads: QuestionScope = QuestionScope.FIRST

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ORACLE if self.rereads is QuestionScope.EACH else self.variant.name

    @property
    def spelling(self) -> str:
        shown = str(self.variant.policy)
        return f"{ORACLE}: {shown}" if self.rereads is QuestionScope.EACH else shown

    @property
    def scope(self) -> QuestionScope:
        return self.rereads if self.variant.needs_question else QuestionScope.CONTEXT

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        budget = self.variant.policy.budget
        if budget.tokens == WITHOUT_LIMIT:
            return (WHOLE,)
        return wanted if budget.tokens is None and budget.kept is None else (OWN,)

    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        under = bench.engine.under(self.variant.policy, None if tokens is None else str(tokens))
        prompts = {"question": question.question} if self.variant.needs_question else {}
        return under.read(conversation, prompts)


@dataclass(frozen=True)
class RetrievalMethod(ComparedMethod):
    """Text that is looked up for each question, under the full cache."""

    name: str
    retrieval: RetrievalBaseline

    @property
    def spelling(self) -> str:
        return spell(self.retrieval)

    @property
    def scope(self) -> QuestionScope:
        return QuestionScope.EACH

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        return wanted if self.retrieval.tokens is None else (OWN,)

    def matched(self, wanted: MatchedQuantity) -> MatchedQuantity:
        """Tokens: what is read is held in full, and a budget filled as far as segments fit."""
        del wanted
        return MatchedQuantity.TOKENS

    def read(
        self,
        bench: ModelContext,
        conversation: Conversation,
        tokens: int | None,
        question: Question,
    ) -> ConversationMemory:
        room = self.retrieval.tokens if tokens is None else tokens
        assert room is not None  # a budget, where the spelling has none
        passages = bench.passages(conversation, self.retrieval.embedder, self.retrieval.segment)
        made = passages.fitting(self.retrieval.ranked(passages, question.question), room)
        memory = bench.engine.under("full").read(made)
        context = len(bench.engine.tokenizer.encode_conversation(conversation).ids)
        full = bench.engine.loaded.decoder.spec.full_bytes(context)
        figures = replace(
            memory.figures, context_tokens=context, full_kv_bytes=full, budget_tokens=room
        )
        return replace(memory, figures=figures)


def parse_control(name: str) -> ComparedMethod:
    """The control of that name; else as `parse_method`.

    Raises:
        UnknownName: it is nothing, but like one of the controls; else as `parse_method`.
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
        return RetrievalMethod(name, build(RETRIEVALS.load(base), calls[0].parameters))
    return PolicyMethod(parse_variant(name))


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "drop": {"compensation": Drop()},
    "exact": {"storage": Exact()},
    "fold": {"compensation": FoldEma()},
    "whole": {"schedule": Whole()},
    "blockwise": {"schedule": Blockwise()},
    "sensitivity": {"budget": Sensitivity(floor=0.015), "protect": Protect(sinks=0, recent=0)},
    "pooled": {"budget": Pooled()},
}


@dataclass(frozen=True)
class PolicyVariant:
    """A policy with its budget open, and the name that tables give it."""

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
    """The case of that name.

    Raises:
        UnknownName: no such twist; else as `Policy.parse`.
    """
    base, *twists = name.split(":")
    if not twists or base not in PRESETS:
        return PolicyVariant(name, Policy.parse(name))
    if strange := [twist for twist in twists if twist not in VARIANTS]:
        raise UnknownName(unknown_name_message("twist of a preset", strange[0], sorted(VARIANTS)))
    return apply_variants(base, *twists)


def apply_variants(name: str, *twists: str) -> PolicyVariant:
    """A preset with another part in one slot or more.

    Raises:
        UsageError: its parts do not go together then.
    """
    parts = {slot: part for twist in twists for slot, part in VARIANTS[twist].items()}
    policy = replace(Policy.parse(name), **parts)
    return PolicyVariant(":".join((name, *twists)), Policy.parse(str(policy)))
