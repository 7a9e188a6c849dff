"""Prefill of prompts in blocks, into the one cache of a session of the prefix backend."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from larder.cache.sequence import SequenceCache
from larder.core.types import AppendKind, Mode
from larder.models.batch_segment import BatchSegment
from larder.models.lm_head import LOGITS_CHUNK
from larder.server.image_prompts import ImagePromptEncoder
from larder.server.request_state import RequestState
from larder.server.session_backend.image_reader import ImageReader
from larder.server.session_state import SessionState
from larder.server.tiers.disk import DiskTier
from larder.server.token_budget import PrefillTokenBudget
from larder.server.token_logprobs import TokenTexts, token_logprobs, unscored_token


class PrefixPrefill:
    """Splits prompts into blocks and reads them. For the model's thread.

    Args:
        images: encoder of prompts with images.
        disk: receives measurements of prefill speed.
        token_budget: tokens of a prompt between two decode steps beside answers.
        chunk_tokens: most tokens of a prompt that are read between two decode steps; None for a
            block of the policy.
    """

    def __init__(
        self,
        images: ImagePromptEncoder,
        disk: DiskTier,
        token_budget: PrefillTokenBudget,
        chunk_tokens: int | None,
    ) -> None:
        self._token_budget, self._chunk_tokens = token_budget, chunk_tokens
        self._image_reader, self._texts = ImageReader(images), TokenTexts(images.tokenizer)
        self._disk = disk

    def split(self, state: RequestState, text: tuple[int, ...]) -> None:
        """Split what is left of a text into blocks."""
        prefill, session = state.prefill, state.session
        block = self.block(session)
        if state.request.prompt_logprobs:  # all logits of a block are there at once
            vocab_size = session.serving.runtime.decoder.vocab_size
            block = min(block, max(1, LOGITS_CHUNK // vocab_size))
            if not prefill.scored_len:
                prefill.scored_len = 1
                state.listener.on_logprobs((unscored_token(text[0], self._texts),))
        cached = len(session.residency.cached_ids)
        prefill.blocks = self._image_reader.split(state, text, cached, block)
        prefill.next_block, prefill.prompt_tail = 0, ()
        self._leave_tail(state, text[-1])

    def read_block(self, state: RequestState) -> int:
        """Read the next block; the bytes held meanwhile."""
        self._size_block(state)
        session, block = state.session, state.prefill.block
        cache = session.residency.active
        assert cache is not None
        reader = session.serving.reader(len(state.resolved.prompt_ids))
        started = perf_counter() - self._token_budget.interrupted_seconds
        beside = 0
        cache.reserve(len(block))
        if state.request.prompt_logprobs:
            self._read_scored(state, cache, block)
        else:
            beside = self._image_reader.read(state, reader, block)
        if 2 * len(block) > self.block(session):  # short prefills are slower per token
            seconds = perf_counter() - self._token_budget.interrupted_seconds - started
            self._disk.note_reading(len(block), seconds)
        return max(cache.nbytes, reader.meter.peak_bytes) + beside

    def companions(self, state: RequestState, others: Sequence[RequestState]) -> list[RequestState]:
        """Requests whose next blocks one pass may read with that of `state`."""
        self._size_block(state)
        room, found = self.limit(state), list[RequestState]()
        if not self._reads_plainly(state, room):
            return []
        room -= len(state.prefill.block)
        for each in others:
            is_alike = (
                each.backend is state.backend and each.session.serving is state.session.serving
            )
            if is_alike and self._reads_plainly(each, room):
                room -= len(each.prefill.block)
                found.append(each)
        return found

    def read_together(self, states: Sequence[RequestState]) -> None:
        """Read the next blocks of several requests in one pass."""
        rows = list[BatchSegment]()
        for state in states:
            block = state.prefill.block
            state.cache.reserve(len(block))
            rows.append(BatchSegment(state.cache, block, append_kind=AppendKind.TEXT))
        states[0].session.serving.runtime.decoder.read(rows, Mode.APPEND)

    def limit(self, state: RequestState) -> int:
        """Most tokens of the next block of a request."""
        read = len(state.session.residency.cached_ids)
        return self._token_budget.limit(read, self.block(state.session))

    def block(self, session: SessionState) -> int:
        """Most tokens of a block beside no other answers."""
        block = session.serving.block
        return block if self._chunk_tokens is None else min(block, self._chunk_tokens)

    def _size_block(self, state: RequestState) -> None:
        """Size the next block by the token budget, where it is plain text."""
        if self._token_budget.has_target and state.prefill.steps is None and self._is_plain(state):
            state.prefill.resize_block(self.limit(state))

    def _leave_tail(self, state: RequestState, last: int) -> None:
        """Leave a short last block to the first decode step, which reads it beside other answers.

        Args:
            last: last token of the prompt.
        """
        blocks = state.prefill.blocks
        if (
            state.answer.output_ids
            or not blocks
            or len(blocks[-1]) >= state.backend.tail_tokens(state)
        ):
            return
        if self._is_plain(state):
            state.prefill.prompt_tail = (*blocks.pop(), last)

    def _reads_plainly(self, state: RequestState, room: int) -> bool:
        """True if the next block, of at most `room` tokens, is text of a policy that neither
        observes nor scores it.
        """
        if state.prefill.steps is not None or len(state.prefill.block) > room:
            return False
        return self._is_plain(state)

    def _is_plain(self, state: RequestState) -> bool:
        """True if a prompt is text, under a policy that neither observes nor scores it."""
        if state.request.prompt_logprobs or state.session.serving.is_limited:
            return False
        return not self._image_reader.has_images(state)

    def _read_scored(
        self, state: RequestState, cache: SequenceCache, block: tuple[int, ...]
    ) -> None:
        """Read a block, and send the log-probabilities of the tokens that it predicts."""
        decoder, ids = state.session.serving.runtime.decoder, state.resolved.prompt_ids
        start, scored = cache.next_position, state.prefill.scored_len
        row = BatchSegment(cache, block, append_kind=AppendKind.TEXT)
        logits = decoder.forward_logits([row], Mode.APPEND, range(len(block)))
        predicted = ids[start + 1 : start + 1 + len(block)]
        found = token_logprobs(logits, predicted, state.request.logprobs or 0, self._texts)
        # Those of an earlier attempt are not sent again.
        state.listener.on_logprobs(tuple(found[max(0, scored - start - 1) :]))
        state.prefill.scored_len = max(scored, start + 1 + len(block))
