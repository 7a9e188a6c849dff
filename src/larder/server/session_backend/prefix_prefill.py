"""Prefill of prompts in blocks, into the one cache of a session of the prefix backend."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from larder.cache.sequence import SequenceCache
from larder.core.types import AppendKind, Mode
from larder.models.forward_batch import BatchSegment
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

    def split(self, job: RequestState, text: tuple[int, ...]) -> None:
        """Split what is left of a text into blocks."""
        prefill, session = job.prefill, job.session
        block = self.block(session)
        if job.request.prompt_logprobs:  # all logits of a block are there at once
            vocab_size = session.serving.runtime.decoder.vocab_size
            block = min(block, max(1, LOGITS_CHUNK // vocab_size))
            if not prefill.scored_len:
                prefill.scored_len = 1
                job.listener.on_logprobs((unscored_token(text[0], self._texts),))
        cached = len(session.residency.cached_ids)
        prefill.blocks = self._image_reader.split(job, text, cached, block)
        prefill.next_block, prefill.prompt_tail = 0, ()
        self._leave_tail(job, text[-1])

    def read_block(self, job: RequestState) -> int:
        """Read the next block; the bytes held meanwhile."""
        self._size_block(job)
        session, block = job.session, job.prefill.block
        cache = session.residency.active
        assert cache is not None
        reader = session.serving.reader(len(job.resolved.prompt_ids))
        started = perf_counter() - self._token_budget.interrupted_seconds
        beside = 0
        cache.reserve(len(block))
        if job.request.prompt_logprobs:
            self._read_scored(job, cache, block)
        else:
            beside = self._image_reader.read(job, reader, block)
        if 2 * len(block) > self.block(session):  # short prefills are slower per token
            seconds = perf_counter() - self._token_budget.interrupted_seconds - started
            self._disk.note_reading(len(block), seconds)
        return max(cache.nbytes, reader.meter.peak_bytes) + beside

    def companions(self, job: RequestState, others: Sequence[RequestState]) -> list[RequestState]:
        """Requests whose next blocks one pass may read with that of `job`."""
        self._size_block(job)
        room, found = self.limit(job), list[RequestState]()
        if not self._reads_plainly(job, room):
            return []
        room -= len(job.prefill.block)
        for each in others:
            is_alike = each.backend is job.backend and each.session.serving is job.session.serving
            if is_alike and self._reads_plainly(each, room):
                room -= len(each.prefill.block)
                found.append(each)
        return found

    def read_together(self, jobs: Sequence[RequestState]) -> None:
        """Read the next blocks of several requests in one pass."""
        rows = list[BatchSegment]()
        for job in jobs:
            block = job.prefill.block
            job.cache.reserve(len(block))
            rows.append(BatchSegment(job.cache, block, append_kind=AppendKind.TEXT))
        jobs[0].session.serving.runtime.decoder.read(rows, Mode.APPEND)

    def limit(self, job: RequestState) -> int:
        """Most tokens of the next block of a request."""
        read = len(job.session.residency.cached_ids)
        return self._token_budget.limit(read, self.block(job.session))

    def block(self, session: SessionState) -> int:
        """Most tokens of a block beside no other answers."""
        block = session.serving.block
        return block if self._chunk_tokens is None else min(block, self._chunk_tokens)

    def _size_block(self, job: RequestState) -> None:
        """Size the next block by the token budget, where it is plain text."""
        if self._token_budget.has_target and job.prefill.steps is None and self._is_plain(job):
            job.prefill.resize_block(self.limit(job))

    def _leave_tail(self, job: RequestState, last: int) -> None:
        """Leave a short last block to the first decode step, which reads it beside other answers.

        Args:
            last: last token of the prompt.
        """
        blocks = job.prefill.blocks
        if job.answer.output_ids or not blocks or len(blocks[-1]) >= job.backend.tail_tokens(job):
            return
        if self._is_plain(job):
            job.prefill.prompt_tail = (*blocks.pop(), last)

    def _reads_plainly(self, job: RequestState, room: int) -> bool:
        """True if the next block, of at most `room` tokens, is text of a policy that neither
        observes nor scores it.
        """
        if job.prefill.steps is not None or len(job.prefill.block) > room:
            return False
        return self._is_plain(job)

    def _is_plain(self, job: RequestState) -> bool:
        """True if a prompt is text, under a policy that neither observes nor scores it."""
        if job.request.prompt_logprobs or job.session.serving.is_limited:
            return False
        return not self._image_reader.has_images(job)

    def _read_scored(self, job: RequestState, cache: SequenceCache, block: tuple[int, ...]) -> None:
        """Read a block, and send the log-probabilities of the tokens that it predicts."""
        decoder, ids = job.session.serving.runtime.decoder, job.resolved.prompt_ids
        start, scored = cache.next_position, job.prefill.scored_len
        row = BatchSegment(cache, block, append_kind=AppendKind.TEXT)
        logits = decoder.forward_logits([row], Mode.APPEND, range(len(block)))
        predicted = ids[start + 1 : start + 1 + len(block)]
        found = token_logprobs(logits, predicted, job.request.logprobs or 0, self._texts)
        # Those of an earlier attempt are not sent again.
        job.listener.on_logprobs(tuple(found[max(0, scored - start - 1) :]))
        job.prefill.scored_len = max(scored, start + 1 + len(block))
