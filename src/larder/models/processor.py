"""Processors of vision-language models, which encode texts with images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from larder.core.errors import BadParameter, DependencyError, ModelError
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
