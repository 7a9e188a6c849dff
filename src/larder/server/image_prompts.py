"""Prompts with images: their token ids, and the embeddings that the model merges images into.

Token ids do not tell images apart, but prefixes of sessions are compared by them. So an image token
has an id behind the vocabulary, by a digest of the images of its messages and its index among their
image tokens. Each has 31 bits of its own, so that a search for two images of equal ids would need
as many times 31 bits as an image has tokens. What the model reads are the embeddings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import Any

from larder.core.images import ImageSpans, spans_of
from larder.models.decoder import Decoder
from larder.models.processor import MergedText, NamedProcessor, merge_images
from larder.server.api_errors import invalid_request
from larder.server.request import ApiError, ChatMessage
from larder.server.serving_policy import ServingPolicy
from larder.server.transcript import MAX_TOKEN_ID, CompletedTurn
from larder.session.transcript.chat_template import (
    VARIABLES_ROLE,
    TemplateMessage,
    image_digests,
    split_marks,
)
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

IMAGE_TOKEN_NAMES = ("image_token_id", "image_token_index")  # in configurations of transformers
CACHED_PROMPTS = 8  # whose pixels are kept until the model reads them


@dataclass(frozen=True)
class RenderedPrompt:
    """Messages of one turn as the chat template renders them.

    Args:
        text: marks stand for images that the template has no text for.
        digests: SHA-256 of each image, in order; empty without images.
    """

    text: str
    digests: tuple[str, ...]


@dataclass(frozen=True)
class ImagePart:
    """Part of a prompt whose images are merged.

    Args:
        start: true position of its first token.
        ids: its token ids, those of image tokens behind the vocabulary.
        merged: the text, with positions that count from its start.
    """

    start: int
    ids: tuple[int, ...]
    merged: MergedText

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def spans(self) -> ImageSpans:
        """Images at their true positions."""
        return self.merged.images.shifted(self.start)

    @property
    def nbytes(self) -> int:
        return self.merged.embeddings.nbytes


def rendered_prompt(
    tokenizer: TokenizerAdapter, past: Sequence[CompletedTurn], new: Sequence[ChatMessage]
) -> RenderedPrompt:
    """Rendered text of new messages after completed turns."""
    first = [each for turn in past[:1] for each in turn.messages[:1]]
    variables = [each for each in first if each.role == VARIABLES_ROLE]
    messages = [TemplateMessage(each.role, each.text) for each in (*variables, *new)]
    render = tokenizer.render_continuation if past else tokenizer.render_messages
    digests = [digest for each in new for digest in image_digests(each.text)]
    return RenderedPrompt(render(messages), tuple(digests))


class ImagePromptEncoder:
    """Encoder of prompts with images. For the model's thread.

    Args:
        processor: processor of the model; None for models without a vision tower.
        decoder: the model.
        tokenizer: its tokenizer.
    """

    def __init__(self, processor: Any, decoder: Decoder, tokenizer: TokenizerAdapter) -> None:
        self._processor, self._decoder, self.tokenizer = processor, decoder, tokenizer
        config = decoder.module.config.to_dict()
        named = [config[name] for name in IMAGE_TOKEN_NAMES if name in config]
        self._image_token = named[0] if named else None
        self._inputs: OrderedDict[RenderedPrompt, Mapping[str, Any]] = OrderedDict()

    @property
    def takes_images(self) -> bool:
        """True if the model reads images."""
        return self._processor is not None and self._image_token is not None

    def image_spans(self, ids: Sequence[int]) -> ImageSpans:
        """Spans of image tokens among token ids."""
        vocabulary = self._decoder.vocab_size
        return ImageSpans(spans_of([token >= vocabulary for token in ids]))

    def embedding_bytes(self, ids: Sequence[int]) -> int:
        """Upper bound of the embeddings of a prompt while it is read; 0 without images."""
        if not self.image_spans(ids).spans:
            return 0
        spec = self._decoder.spec
        return len(ids) * spec.width * spec.dtype.itemsize

    def check_policy(self, ids: Sequence[int], serving: ServingPolicy) -> None:
        """Check that sessions under a policy can hold a prompt.

        Raises:
            ApiError: 400: the prompt has images, and the policy evicts or forms episodes.
        """
        if serving.is_chat and self.image_spans(ids).spans:
            raise invalid_request(
                f"The messages have images, but sessions under {serving} are read again by their "
                "words: ask with kv_policy 'exact', or serve another policy, such as full.",
                "messages",
            )

    def ids(self, prompt: RenderedPrompt, images: Mapping[str, bytes]) -> tuple[int, ...]:
        """Token ids of a prompt, those of image tokens behind the vocabulary.

        Args:
            images: files of the images, by digest.

        Raises:
            ApiError: 400: an image is missing, or images and text do not go together.
        """
        if any(digest not in images for digest in prompt.digests):
            raise invalid_request(
                "An image of an earlier message is no longer in a cache, and images are not "
                "stored: send all messages with their images.",
                "messages",
            )
        inputs = self._inputs.get(prompt)
        if inputs is None:
            inputs = self._inputs[prompt] = self._processed(prompt, images)
            if len(self._inputs) > CACHED_PROMPTS:
                self._inputs.popitem(last=False)
        ids = inputs["input_ids"][0].tolist()
        indices = [index for index, token in enumerate(ids) if token == self._image_token]
        if not indices or indices[-1] == len(ids) - 1:
            raise invalid_request(
                "The chat template of the model has no text behind an image, or none for it: send "
                "text behind the image.",
                "messages",
            )
        for number, index in enumerate(indices):
            ids[index] = self._image_id(prompt.digests, number)
        return tuple(ids)

    def merged(self, start: int, prompt: RenderedPrompt, images: Mapping[str, bytes]) -> ImagePart:
        """Part of a prompt with its images merged, which runs the vision tower.

        Args:
            start: true position of its first token.
            images: files of the images, by digest.

        Raises:
            ApiError: 400: as `ids`.
        """
        ids = self.ids(prompt, images)
        try:
            merged = merge_images(self._decoder, self._inputs.pop(prompt))
        except ValueError as error:
            raise _mismatch(error) from error
        return ImagePart(start, ids, merged)

    def _processed(self, prompt: RenderedPrompt, images: Mapping[str, bytes]) -> Mapping[str, Any]:
        from PIL import Image

        processor = self._processor
        if isinstance(processor, NamedProcessor):
            processor = processor.loaded
        text = processor.image_token.join(split_marks(prompt.text))
        shown = text.count(processor.image_token)
        if shown != len(prompt.digests):
            raise invalid_request(
                f"The messages have {len(prompt.digests)} images, but the prompt {shown} image "
                f"tokens ({processor.image_token}): leave these out of texts.",
                "messages",
            )
        try:
            decoded = {
                digest: Image.open(BytesIO(images[digest])).convert("RGB")
                for digest in dict.fromkeys(prompt.digests)
            }
            opened = [decoded[digest] for digest in prompt.digests]
            return processor(
                text=[text], images=[opened], return_tensors="pt", add_special_tokens=False
            )
        except (OSError, ValueError) as error:
            raise _mismatch(error) from error

    def _image_id(self, digests: Sequence[str], number: int) -> int:
        """Id of an image token of a turn, the same for the same images."""
        vocabulary = self._decoder.vocab_size
        named = f"{number} {' '.join(digests)}".encode()
        digest = int.from_bytes(sha256(named).digest()[:8])
        return vocabulary + digest % (MAX_TOKEN_ID - vocabulary)


def _mismatch(error: OSError | ValueError) -> ApiError:
    return invalid_request(f"The images do not fit the prompt: {error}.", "messages")
