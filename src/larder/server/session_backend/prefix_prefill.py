"""Prefill of prompts into the one cache of a session of the prefix backend, in steps of at most a
block, an image or a context.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from larder.cache.sequence import SequenceCache
from larder.core.types import AppendKind, Mode, TokenIds
from larder.models.batch_segment import BatchSegment
from larder.models.lm_head import LOGITS_CHUNK
from larder.prefill.base import split_blocks
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.server.api_errors import invalid_request
from larder.server.context_prompts import ContextPrompts
from larder.server.image_prompts import ImagePart, ImagePromptEncoder, rendered_prompt
from larder.server.request import ChatMessage
from larder.server.request_state import RequestState
from larder.server.session_state import SessionState
from larder.server.tiers.disk import DiskTier
from larder.server.token_budget import PrefillTokenBudget
from larder.server.token_logprobs import TokenTexts, token_logprobs, unscored_token
from larder.session.transcript.chat_template import image_digests


class ContextReader:
    """Reads the contexts of requests by the schedule of their policy. For the model's thread.

    Args:
        contexts: chunks that were read before.
    """

    def __init__(self, contexts: ContextPrompts) -> None:
        self._contexts = contexts

    def workspace_nbytes(self, state: RequestState) -> int:
        """Upper bound of the bytes beside the cache while contexts are read."""
        serving = state.session.serving
        count = serving.runtime.decoder.spec.full_bytes(len(state.resolved.prompt_ids))
        return serving.policy.schedule.context_copies * count

    def begin(self, state: RequestState) -> None:
        """Make the steps of a request's prefill."""
        assert state.contexts is not None
        state.prefill.steps = self._steps(state)
        state.prefill.estimated_blocks = len(state.contexts.contexts) + 1

    def read_block(self, state: RequestState) -> int:
        """Run one step; the approximate number of tokens read."""
        prefill = state.prefill
        assert prefill.steps is not None
        try:
            next(prefill.steps)
        except StopIteration:
            prefill.steps = None
        prefill.estimated_blocks -= 1
        contexts = () if state.contexts is None else state.contexts.contexts
        return max(map(len, contexts), default=1)

    def _steps(self, state: RequestState) -> Generator[object, None, None]:
        """Steps that read all but the last token of the prompt, which is left to decoding."""
        session, text = state.session, state.contexts
        cache = session.residency.active
        assert text is not None and cache is not None
        schedule, ids = session.serving.policy.schedule, state.resolved.prompt_ids
        # The question and the end of the template follow the last context.
        text = replace(text, suffix=text.suffix[:-1])
        reader = session.serving.reader(len(ids))
        sequence, source = PrefillSequence(cache, {}), self._contexts.source(session.tenant)
        reuse = yield from schedule.context_steps(reader, sequence, text, source)
        session.residency.cached_ids.extend(ids[:-1])
        state.counts.cached = reuse.cached_tokens
        state.counts.recomputed = reuse.recomputed_tokens


@dataclass(frozen=True)
class ImageTurn:
    """Turn of a request whose messages have images.

    Args:
        number: number of turns before it.
        start, stop: true positions of its prompt.
        messages: its new messages.
    """

    number: int
    start: int
    stop: int
    messages: tuple[ChatMessage, ...]


class ImageReader:
    """Reads the blocks of a request's prompt, those with images from merged embeddings.

    Args:
        encoder: encoder of the images.
    """

    def __init__(self, encoder: ImagePromptEncoder) -> None:
        self._encoder = encoder

    def has_images(self, state: RequestState) -> bool:
        """True if some messages of a request, or of its past turns, have images."""
        return bool(_shown_turns(state))

    def split(
        self, state: RequestState, text: TokenIds, start: int, size: int
    ) -> list[tuple[int, ...]]:
        """Blocks of a text from `start` on, without its last token.

        No block cuts an image, or holds tokens of two turns of which one has images.
        """
        shown = self._encoder.image_spans(text)
        if not shown.spans:
            return split_blocks(text[start:-1], size)
        edges = {edge for turn in _shown_turns(state) for edge in (turn.start, turn.stop)}
        cuts = [start, *sorted(edge for edge in edges if start < edge < len(text) - 1)]
        blocks = list[tuple[int, ...]]()
        for first, stop in zip(cuts, [*cuts[1:], len(text) - 1], strict=True):
            blocks += split_blocks(text[first:stop], size, shown.within(first, stop))
        return blocks

    def read(self, state: RequestState, reader: PrefillReader, block: TokenIds) -> int:
        """Append a block to the cache of a request; bytes of the embeddings beside the cache.

        Raises:
            ApiError: 400: an image of the block is in no message of the request.
        """
        cache, decoder = state.cache, state.session.serving.runtime.decoder
        start = cache.next_position
        part = self._part_at(state, start)
        if part is None:
            reader.append([PrefillSequence(cache, {})], block)
            return 0
        own = part.merged.ids[start - part.start :][: len(block)]
        part.merged.place(cache, part.start)
        with part.merged.embedded(decoder, cache, part.start):
            reader.append([PrefillSequence(cache, {}, images=part.spans)], own)
        return part.nbytes

    def _part_at(self, state: RequestState, position: int) -> ImagePart | None:
        """Part of the prompt with images at a position; None in front of and between them."""
        held = state.prefill.image_part
        if held is not None and held.start <= position < held.stop:
            return held
        state.prefill.image_part = None
        for turn in _shown_turns(state):
            if turn.start <= position < turn.stop:
                state.prefill.image_part = self._merged(state, turn)
        return state.prefill.image_part

    def _merged(self, state: RequestState, turn: ImageTurn) -> ImagePart:
        past = state.resolved.past_turns[: turn.number]
        prompt = rendered_prompt(self._encoder.tokenizer, past, turn.messages)
        part = self._encoder.merged(turn.start, prompt, state.request.images)
        if part.ids != state.resolved.prompt_ids[turn.start : turn.stop]:
            raise invalid_request(
                "Messages with images are rendered otherwise than when they were read first: begin "
                "a new session.",
                "messages",
            )
        return part


def _shown_turns(state: RequestState) -> list[ImageTurn]:
    found, start, resolved = list[ImageTurn](), 0, state.resolved
    for index, turn in enumerate(resolved.past_turns):
        stop = start + len(turn.prompt_ids)
        found.append(ImageTurn(index, start, stop, turn.messages))
        start += turn.tokens
    new = resolved.new_messages
    found.append(ImageTurn(len(resolved.past_turns), start, len(resolved.prompt_ids), new))
    return [turn for turn in found if any(image_digests(each.text) for each in turn.messages)]


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

    def split(self, state: RequestState, text: TokenIds) -> None:
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

    def _read_scored(self, state: RequestState, cache: SequenceCache, block: TokenIds) -> None:
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
