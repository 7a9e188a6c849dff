"""What comes back for a question."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """An answer and what it took.

    Args:
        question: as asked.
        text: the answer, without its end of turn.
        ids: its tokens.
        episode: the number of the episode that answered; None where there are none.
        similarity: of the question to that episode.
        decode_seconds: from the question's first token read to the answer's last token chosen.
        question_tokens: tokens of the question's turn.
        held_bytes: of all caches together while it was given, with the room set aside for it.
        pages: of the slow tier that were asked for while answering, over layers, heads and steps.
        pages_moved: those of them that were not in the fast tier already.
        tokens_rebuilt: keys and values that were computed again while answering, over layers and
            steps, and those of other layers that had to be run through for it.
        operations: multiplications and additions that this took.
    """

    question: str
    text: str
    ids: tuple[int, ...]
    episode: int | None
    similarity: float | None
    decode_seconds: float
    question_tokens: int
    held_bytes: int
    pages: int = 0
    pages_moved: int = 0
    tokens_rebuilt: int = 0
    operations: int = 0

    @property
    def new_tokens(self) -> int:
        return len(self.ids)
