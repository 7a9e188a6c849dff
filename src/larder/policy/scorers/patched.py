"""Scorer by attention from a prompt that is read behind every block and discarded.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 2.3, eq. 3. The prompt decides
what the method is. An episode's representative segments are EpiCache's. A general request for what
is important, `prompt="summarize"`, is that of Kim et al., "InfiniPot: Infinite Context Processing
on Memory-Constrained LLMs" (2024), arXiv:2410.01518. The user's own question, `prompt="question"`,
is Corallo and Papotti, "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models"
(2024), arXiv:2408.00167, and EpiCache's upper bound. A task that all questions will be of, with
examples perhaps, `prompt="task"`, is Corallo, Weller, Petroni and Papotti, "Beyond RAG: Task-Aware
KV Cache Compression for Comprehensive Knowledge Reasoning" (2025), arXiv:2503.04973. What users
are known to ask for, `prompt="guidance"`, is modeled on Zhu et al., "OracleKV: Oracle Guidance for
Question-Independent KV Cache Compression" (2025).

`larder` and `code` share a query's weight among cached entries only, so that a token that looks
mostly at its own prompt has as much of a say as any other; the maximum over tokens then compares
like with like. `paper` takes plain attention, where the prompt's tokens up to the query take their
share. No variant follows the released code in two details: scores are float32 here and of the
model's type there, and there the prompt starts one position earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from larder.core.observation import Observation
from larder.core.types import Packed, Variant
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import (
    AttentionScorer,
    PromptScorer,
    whole_pass_window,
    without_pass_keys,
)


@dataclass(frozen=True)
class Patched(PromptScorer, AttentionScorer):
    """The highest weight that any prompt token of any query head of the group gives an entry.

    Args:
        prompt: its name: `episode`, `question`, `summarize`, `guidance`, `repeat`, or any other
            whose text is given to `Engine.read`.
        variant: `larder` and `code` attend to the cache only, `paper` to the prompt too.
    """

    prompt: str = "episode"
    variant: Variant = Variant.LARDER

    def default_reduction(self) -> tuple[str, str]:
        return "max", "group_max"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        if self.variant is not Variant.PAPER:
            return ObservationWindow(observation.queries, observation.entries)
        return whole_pass_window(observation)

    def finish(self, observation: Observation, heads: list[Tensor]) -> Packed:
        return without_pass_keys(observation, heads)


Part = Patched
