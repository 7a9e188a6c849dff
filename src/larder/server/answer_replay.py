"""An answer once more: who asks the same again, the same way, gets the same."""

from __future__ import annotations

from larder.engine.detokenizer import IncrementalDetokenizer
from larder.server.request import Listener, Report, Ticket
from larder.server.session_info import session_info
from larder.server.session_state import CompletedTurn, SessionState
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


class CompletedTicket(Ticket):
    """Of an answer that was there already."""

    def cancel(self) -> None:
        """Nothing is left to cancel."""


def replay_answer(
    scribe: TokenizerAdapter,
    sitting: SessionState,
    said: CompletedTurn,
    listener: Listener,
    seconds: float,
    durable: bool | None,
) -> Ticket:
    """Tell an answer that was given before, from its tokens: the text that is kept of it lacks the
    white space around it.

    Args:
        seconds: since it was asked for once more.
        durable: as in `Report`.
    """
    ids = said.answer[: max(0, len(said.answer) - len(scribe.closing()))]
    stream = IncrementalDetokenizer(scribe.decode, said.asked.stop, listener.on_text)
    all(stream.push(token) for token in ids)
    stream.finish()
    prompt, view = sitting.tokens - len(said.answer), session_info(sitting)
    counts = prompt, prompt, 0, 0, len(ids), view.evicted_tokens, view.merged_tokens
    told = sitting.name, *counts, sitting.is_lossless, sitting.tier, said.reason
    listener.on_done(Report(*told, 0.0, seconds, seconds, durable))
    return CompletedTicket()
