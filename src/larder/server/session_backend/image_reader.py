"""Reader of prompts with images: blocks that cut no image, read from merged embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from larder.prefill.base import split_blocks
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.server.api_errors import invalid_request
from larder.server.image_prompts import ImagePart, ImagePromptEncoder, rendered_prompt
from larder.server.request import ChatMessage
from larder.server.request_state import RequestState
from larder.session.transcript.chat_template import image_digests


@dataclass(frozen=True)
class ShownTurn:
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
        self, state: RequestState, text: tuple[int, ...], start: int, size: int
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

    def read(self, state: RequestState, reader: PrefillReader, block: tuple[int, ...]) -> int:
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

    def _merged(self, state: RequestState, turn: ShownTurn) -> ImagePart:
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


def _shown_turns(state: RequestState) -> list[ShownTurn]:
    found, start, resolved = list[ShownTurn](), 0, state.resolved
    for index, turn in enumerate(resolved.past_turns):
        stop = start + len(turn.prompt_ids)
        found.append(ShownTurn(index, start, stop, turn.messages))
        start += turn.tokens
    new = resolved.new_messages
    found.append(ShownTurn(len(resolved.past_turns), start, len(resolved.prompt_ids), new))
    return [turn for turn in found if any(image_digests(each.text) for each in turn.messages)]
