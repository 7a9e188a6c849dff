"""A prompt of what was said about as near to the question as stated, in the question's place.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 2.3, figure 2: utterances are
ranked by how like the question they are, and blocks are judged by a prompt of some of one rank. How
many make a prompt it does not say; here it is eight, as many as an episode shows segments. One must
know the question before reading, so this is no method; the control `oracle` shows the question
itself in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.bench.cases import case
from larder.bench.subject import Scope, Subject
from larder.bench.workbench import Workbench
from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, SpellingError
from larder.core.spelling import build, parse, spell
from larder.session.memory import Memory
from larder.session.prompts import episode_prompt
from larder.session.reading import read

PROMPT_AT = "prompt_at"
POLICY = "exact_question"  # what the prompt stands in


@dataclass(frozen=True)
class PromptAt:
    """Utterances around a rank of nearness.

    Args:
        percentile: of the rank; 0 is what is most like the question.
        utterances: in a prompt.
        embedder: as episodes have it.
    """

    percentile: int = 5
    utterances: int = 8
    embedder: str = "minilm"

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise BadParameter(f"prompt_at.percentile must be 0 to 100, got {self.percentile}.")
        if self.utterances < 1:
            raise BadParameter(f"prompt_at.utterances must be 1 or more, got {self.utterances}.")

    def chosen(self, ranked: Sequence[int]) -> list[int]:
        """Those around the percentile, in the order they were said.

        Args:
            ranked: utterances, the most similar first.
        """
        middle = round(len(ranked) * self.percentile / 100)
        last = max(0, len(ranked) - self.utterances)
        first = min(max(0, middle - self.utterances // 2), last)
        return sorted(ranked[first : first + self.utterances])


@dataclass(frozen=True)
class Prompted(Subject):
    """The policy `exact_question` under another prompt than the question."""

    name: str
    prompt: PromptAt

    @property
    def spelling(self) -> str:
        return f"{spell(self.prompt)}: {case(POLICY).policy}"

    @property
    def scope(self) -> Scope:
        return Scope.EACH

    def read(
        self, bench: Workbench, conversation: Conversation, tokens: int | None, question: Question
    ) -> Memory:
        passages = bench.passages(conversation, self.prompt.embedder, 1)
        ranked = passages.nearest(question.question, range(len(passages.segments)))
        texts = [passages.segments[number].text for number in self.prompt.chosen(ranked)]
        budget = None if tokens is None else str(tokens)
        under = bench.engine.under(case(POLICY).policy, budget)
        prompts = {"question": episode_prompt(under.scribe, texts)}
        return read(under.desk, conversation, under.policy, under.sizes, prompts)


def prompted(name: str) -> Prompted:
    """The subject that is spelled so.

    Raises:
        LarderError: it is no `prompt_at(...)` alone, or a value is out of range.
    """
    calls = parse(name)
    if len(calls) != 1:
        raise SpellingError(f"{name!r} has a policy of its own, so nothing can stand behind it.")
    return Prompted(name, build(PromptAt, calls[0].parameters))
