"""Processors of vision-language models, which encode texts with images, and images merged into the
input embeddings of a text by the model that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, DependencyError, ModelError
from larder.core.images import ImageSpans
from larder.core.types import Mode
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.body_call import BodyCall, OuterCall
from larder.models.decoder import Decoder
from larder.models.forward_batch import ForwardBatch
from larder.models.transformers_logging import silence_transformers

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class NamedProcessor:
    """Processor by name, loaded when images are first given.

    Args:
        source: local folder, or name on the Hugging Face hub.
        revision: `revision` of the name, where one is given.
    """

    source: str
    revision: Mapping[str, str]

    def __call__(self, **inputs: Any) -> Any:
        """Encode texts with images as the processor of transformers does."""
        return self.loaded(**inputs)

    @cached_property
    def loaded(self) -> Any:
        """Processor of transformers.

        Raises:
            DependencyError: Pillow, or what this processor needs beside it, is not installed.
            ModelError: the processor cannot be loaded.
        """
        if find_spec("PIL") is None:
            raise DependencyError("Images need the package Pillow: pip install 'larder[vision]'.")
        from transformers import AutoProcessor

        try:
            with silence_transformers():
                return AutoProcessor.from_pretrained(
                    self.source, trust_remote_code=False, **self.revision
                )
        except ImportError as error:
            raise DependencyError(
                f"The processor of {self.source} needs a package beside the extra larder[vision]: "
                f"{_first_sentence(error)}."
            ) from error
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"The processor of {self.source} cannot be loaded: {_first_sentence(error)}. Give "
                "a folder that a processor of transformers saved, or its name on the hub."
            ) from error


def processor_of(source: str, config: Any, revision: Mapping[str, str]) -> NamedProcessor | None:
    """Processor that a model was saved with; None for models without a vision tower.

    Args:
        source: what the model was loaded from.
        config: its configuration.
        revision: as for `NamedProcessor`.
    """
    if "vision_config" not in config.to_dict():
        return None
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    return NamedProcessor(source, revision)


def tokenizer_of(processor: Any) -> Any:
    """Tokenizer of a processor of transformers.

    Raises:
        BadParameter: it has none.
    """
    try:
        return processor.tokenizer
    except AttributeError as error:
        raise BadParameter(
            "processor must be one of transformers with a tokenizer, as AutoProcessor loads it, "
            f"got a {type(processor).__name__}: give it, or the tokenizer as well."
        ) from error


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".") or type(error).__name__


@dataclass(frozen=True)
class MergedText:
    """Text whose images are merged into its input embeddings.

    Args:
        ids: token ids, image tokens included.
        embeddings: input embedding of each token.
        positions: positions of M-RoPE; an empty tensor where RoPE counts one per token.
        images: tokens of the images.
    """

    ids: tuple[int, ...]
    embeddings: Float[Tensor, "N hidden"]
    positions: Int[Tensor, "A _"]
    images: ImageSpans

    def place(self, cache: SequenceCache, start: int = 0) -> None:
        """Record the positions of M-RoPE in a cache; none are recorded without them.

        Args:
            start: true position of the first token.
        """
        if len(self.positions):
            known = cache.model_positions
            first = int(known.at(torch.tensor([start]), start).max())
            cache.model_positions = known.extended(start, self.positions + first)

    @contextmanager
    def embedded(self, decoder: Decoder, cache: SequenceCache, start: int = 0) -> Iterator[None]:
        """Context in which the tokens appended to a cache are read from the embeddings.

        Args:
            start: true position of the first token.
        """

        def replace_ids(
            body: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            batch = named.get(CONTEXT_KEYWORD)
            if not isinstance(batch, ForwardBatch) or batch.mode is not Mode.APPEND:
                return None
            if batch.segments[0].cache is not cache:
                return None
            indices = [place - start for place in batch.segments[0].positions()]
            rows = self.embeddings[indices]
            return args, {**named, "input_ids": None, "inputs_embeds": rows[None]}

        handle = decoder.body.register_forward_pre_hook(replace_ids, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


class _BodyReached(Exception):
    """Raised where a model calls its body, whose layers are not to run."""


def merge_images(decoder: Decoder, inputs: Mapping[str, Any]) -> MergedText:
    """Run a model up to its layers, which merges the images of one text into its embeddings.

    Args:
        inputs: what the processor of the model made of one text and its images.

    Raises:
        ModelError: the model does not take images, or an argument of its layers is unsupported.
    """
    reached = dict[str, Any]()

    def stop(body: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        reached.update(named)
        raise _BodyReached

    given = {
        n: v.to(decoder.spec.device) if isinstance(v, Tensor) else v for n, v in inputs.items()
    }
    handle = decoder.body.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad(), decoder.attention:
            decoder.module(**given, use_cache=False)
    except _BodyReached:
        pass
    finally:
        handle.remove()
    outer = OuterCall(given["input_ids"], given.get("attention_mask"))
    call = BodyCall.of(reached, 0, outer, decoder.module.get_input_embeddings())
    if not call.has_embeddings or not call.images[0].spans:
        raise ModelError(
            f"{type(decoder.module).__name__} merged no image into the text: give images to a "
            "model with a vision tower, and a prompt with its image token."
        )
    positions = call.model_positions[0] if call.model_positions else torch.zeros(0, 0).long()
    columns = list(call.columns[0])
    return MergedText(call.ids[0], call.embeddings[0, columns], positions, call.images[0])
