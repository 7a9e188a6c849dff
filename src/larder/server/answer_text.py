"""Text of an answer for its listener: new, with log-probabilities, or that of a stored answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from larder.engine.detokenizer import REPLACEMENT_CHARACTER, IncrementalDetokenizer
from larder.server.request import Listener, Report, Ticket, TokenLogprob
from larder.server.session_info import session_info
from larder.server.session_state import SessionState
from larder.server.transcript import CompletedTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


class AnswerText:
    """Sends the text of an answer as it becomes final, each token's log-probabilities just before
    the text that begins with it. What a stop string cuts off is sent in neither form.

    Args:
        decode: text of token ids.
        stops: strings that end the answer.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], listener: Listener
    ) -> None:
        self._listener, self._sent_len, self._is_cut = listener, 0, False
        self._stream = IncrementalDetokenizer(decode, stops, self._send)
        self._waiting = deque[tuple[int, TokenLogprob]]()  # with the first character of each

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._stream.text

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._stream.matched_stop

    def push(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Add one token; returns False once a stop string ends the answer."""
        if logprob is not None:
            self.add_logprob(logprob)
        self._is_cut = not self._stream.push(token)
        return not self._is_cut

    def add_logprob(self, logprob: TokenLogprob) -> None:
        """Add the log-probabilities of the token that comes next, or of one without text."""
        start = len(self._stream.text.rstrip(REPLACEMENT_CHARACTER))
        self._waiting.append((start, logprob))

    def finish(self) -> None:
        """Send what was withheld."""
        self._stream.finish()
        if not self._is_cut:
            self._release(len(self._stream.text) + 1)

    def _send(self, text: str) -> None:
        self._sent_len += len(text)
        self._release(self._sent_len)
        self._listener.on_text(text)

    def _release(self, stop: int) -> None:
        """Send the log-probabilities of tokens that begin before a character."""
        ready = list[TokenLogprob]()
        while self._waiting and self._waiting[0][0] < stop:
            ready.append(self._waiting.popleft()[1])
        if ready:
            self._listener.on_logprobs(tuple(ready))


def replay_answer(
    tokenizer: TokenizerAdapter,
    session: SessionState,
    completed_turn: CompletedTurn,
    listener: Listener,
    seconds: float,
    durable: bool | None,
) -> Ticket:
    """Send a stored answer again, decoded from its tokens: the stored text is stripped of
    surrounding white space.

    Args:
        seconds: time since the repeated request arrived.
        durable: as in `Report`.
    """
    ids = completed_turn.answer_ids[
        : max(0, len(completed_turn.answer_ids) - len(tokenizer.end_of_turn_ids()))
    ]
    stream = IncrementalDetokenizer(tokenizer.decode, completed_turn.params.stop, listener.on_text)
    all(stream.push(token) for token in ids)
    stream.finish()
    prompt, view = session.transcript.tokens - len(completed_turn.answer_ids), session_info(session)
    report = Report(
        session=session.name,
        prompt_tokens=prompt,
        cached_tokens=prompt,
        restored_tokens=0,
        recomputed_tokens=0,
        new_tokens=len(ids),
        evicted_tokens=view.evicted_tokens,
        merged_tokens=view.merged_tokens,
        lossless=session.residency.is_lossless,
        tier=session.residency.tier,
        reason=completed_turn.reason,
        wait_seconds=0.0,
        first_seconds=seconds,
        seconds=seconds,
        durable=durable,
    )
    listener.on_done(report)
    return Ticket()
