"""Keep what a prompt looks at, read behind every block and then forgotten.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 2.3, eq. 3. The prompt decides
what the method is: an episode's representative segments (EpiCache), a general request for what is
important (Kim et al., "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs" (2024),
arXiv:2410.01518), the user's own question (Corallo and Papotti, "FINCH: Prompt-guided Key-Value
Cache Compression for Large Language Models" (2024), arXiv:2408.00167; EpiCache's upper bound).

A query's weights are normalised over cached entries only, in float32 (the released code stays in
the model's type); the prompt's tokens are at the true next positions (the released code starts one
earlier).
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Prompts, Scratch, Seen
from larder.core.types import Packed
from larder.policy.scorers._attention import highest_weights
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Patched(Scorer):
    """The highest weight that any prompt token of any query head of the group gives an entry.

    Args:
        prompt: its name: `episode`, `question`, `summarize`, `repeat`, or any other whose text is
            given to `Engine.read`.
    """

    prompt: str = "episode"

    def wanted(self) -> frozenset[str]:
        return frozenset({self.prompt})

    def scratch(self, block: tuple[int, ...], start: int, book: Prompts) -> tuple[Scratch, ...]:
        return (Scratch(tuple(book[self.prompt]), (0, start + len(block))),)

    def score(self, seen: Seen) -> Packed:
        return highest_weights(seen.queries, seen.entries, seen.layer.scaling)


Part = Patched
