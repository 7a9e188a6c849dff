"""Scorer by attention from pseudo tokens at the positions of the answer (DapQ).

Tian et al., "Where Matters More Than What: Decoding-aligned KV Cache Compression via
Position-aware Pseudo Queries" (2026), arXiv:2603.11564 (DapQ). Pseudo tokens are read behind the
context, at the positions that the answer will occupy, and forgotten again; what their queries look
at stays. The paper reports that where they stand matters more than what they say (pieces of the
prompt, random tokens or a fixed sentence); `shift` moves them away, to compare.

The paper's prompts end with the question, so that `ends` and `latest` say it again. `prompt` names
it: it is read between context and pseudo tokens, as in the preset `dapq`, which needs its question
before it reads. Without one the pseudo tokens look for nothing in particular: on the bundled model
and talks of 1000 tokens, at a quarter of the context, 0 of 10 answers against 4 of 10 behind the
question. Moving them 500 positions away changed nothing there: that where they stand matters is not
shown here.

Weights are shared among cached entries only and averaged over pseudo queries; the paper's text was
not at hand for this, nor its code. Where a question comes between context and answer, the answer
stands later by its length, which `shift` can allow for. Sliding-window layers see what they would
see from there. The storage `compact` counts `shift` from behind what each head holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.core.arguments import require
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import TokenIds
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import AttentionScorer


class Content(Enum):
    """Content of the pseudo tokens.

    ENDS: the first half the beginning of the block just read, the second half its end.
    LATEST: the end of the block.
    FIXED: the request to repeat, over and over, whatever the context.
    """

    ENDS = "ends"
    LATEST = "latest"
    FIXED = "fixed"


@dataclass(frozen=True)
class PositionsFirst(AttentionScorer):
    """The mean weight that pseudo queries give an entry.

    Args:
        tokens: pseudo tokens, fewer where a block is shorter; the paper finds 32 to 64 best.
        content: what they say.
        shift: how much later than right behind the context they stand, in positions; below 0
            earlier, but never before the first.
        prompt: the name of a request that is read in front of them, such as `question`; none by
            default, which suits contexts that end with it.
    """

    tokens: int = 32
    content: Content = Content.ENDS
    shift: int = 0
    prompt: str = ""

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "positions_first.tokens", "at least 1", self.tokens)

    def required_prompts(self) -> frozenset[str]:
        fixed = {"repeat"} if self.content is Content.FIXED else frozenset[str]()
        return frozenset({self.prompt} - {""}) | fixed

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        stop = start + len(block)
        shift = max(self.shift, -stop)
        request = tuple(prompts[self.prompt]) if self.prompt else ()
        text = request + self._text(block + request, prompts)
        return (ScratchPrompt(text, (0, stop), shift=shift),)

    def default_reduction(self) -> tuple[str, str]:
        return "mean", "group_mean"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        return ObservationWindow(observation.queries[:, -self.tokens :], observation.entries)

    def _text(self, block: TokenIds, prompts: Prompts) -> tuple[int, ...]:
        if self.content is Content.FIXED:
            request = tuple(prompts["repeat"])
            return tuple(request[index % len(request)] for index in range(self.tokens))
        first = self.tokens // 2 if self.content is Content.ENDS else 0
        if len(block) <= self.tokens:
            return block
        return block[:first] + block[first - self.tokens :]


Part = PositionsFirst
