"""What was said in a chat, token by token: all that is needed to read it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from larder.core.conversation import Conversation
from larder.session.prefill import PrefillInput
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter, Transcript


@dataclass(frozen=True)
class ChatTurn:
    """A question and its answer, as said.

    Args:
        ids: the tokens of both turns as the model read them, from the header of the question's to
            the end of the answer's.
    """

    question: str
    answer: str
    ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """Both as one segment, for embedding."""
        return f"{self.question}\n{self.answer}"


@dataclass(frozen=True)
class ChatLog:
    """A chat from its beginning.

    Args:
        history: what was read before the first turn; without messages where nothing was.
        exchanges: in the order they were said, whichever episode answered.
    """

    history: Conversation
    exchanges: tuple[ChatTurn, ...] = ()

    def plus(self, exchange: ChatTurn) -> ChatLog:
        """The log with one more exchange."""
        return replace(self, exchanges=(*self.exchanges, exchange))

    def transcript(self, scribe: TokenizerAdapter) -> Transcript:
        """The history as the model reads it."""
        return scribe.write(self.history) if self.history.messages else Transcript((), ())

    def source(self, transcript: Transcript) -> PrefillInput:
        """All of it, to be read."""
        texts = tuple(exchange.text for exchange in self.exchanges)
        ids = tuple(token for exchange in self.exchanges for token in exchange.ids)
        return PrefillInput(self.history, transcript, texts, ids)
