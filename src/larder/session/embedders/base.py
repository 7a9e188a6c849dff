"""Interface of embedders, and their loading by name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32
from torch import Tensor

from larder.core.errors import BadParameter, ModelError, UnknownName
from larder.core.registry import Family, unknown_name_message

EMBEDDERS = Family("embedder", "larder.session.embedders")


class Embedder(ABC):
    """Text embedder, whose cosine measures how similar two texts are in topic.

    Rows have length 1. An empty list gives an array [0, D]. The row of a text depends on the other
    texts of a call by rounding alone.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name by which `load_embedder` loads it again."""

    @abstractmethod
    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """Embed parts of a conversation: segments to cluster, and turns of a chat."""

    @abstractmethod
    def embed_questions(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """Embed bare questions, to match against the centroids of segments."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a segment that are embedded, those behind them left out; None for all."""
        return None

    def num_tokens(self, text: str) -> int:
        """Tokens of a segment; its words, if the model has no tokenizer."""
        return len(text.split())

    def reads_whole(self, text: str) -> bool:
        """True if all of a question is embedded; False if it is longer than the model reads, or has
        words that it does not know, such as those of another script."""
        return True


def load_embedder(
    name: str,
    device: str = "cpu",
    table: Float[Tensor, "V D"] | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Embedder:
    """Load an embedder by name.

    Args:
        name: `minilm` (the default of Larder), `tokens` (the language model's own table), `qwen3`
            (its smallest), or any Qwen3-Embedding or sentence-transformers model: a local folder,
            or a Hugging Face name written `owner/model`.
        device: device of the embedder.
        table: input embedding table of the language model, for `tokens`.
        encode: token ids of a text, for `tokens`.

    Raises:
        UnknownName: neither a known name, nor a folder, nor written `owner/model`.
        BadParameter: `tokens` without `table` and `encode`.
        ModelError: a folder that does not exist or holds no weights; a model that does not load.
        DependencyError: a package is missing.
    """
    if name == "tokens":
        if table is None or encode is None:
            raise BadParameter(
                "embedder tokens needs the language model's embedding table and its tokenizer; "
                "pass `table` and `encode`, or take the embedder `minilm`."
            )
        return EMBEDDERS.load(name)(table, encode)
    if name == "sentence_transformers":
        raise BadParameter(
            "embedder sentence_transformers needs a model; "
            "give its folder or `owner/model` as the name."
        )
    if name in EMBEDDERS.names():
        return EMBEDDERS.load(name)(device=device)
    hidden = {"sentence_transformers"} if table is not None else {"sentence_transformers", "tokens"}
    return EMBEDDERS.load(_embedder_family(name))(_model_source(name, hidden), device)


def _model_source(name: str, hidden: Collection[str]) -> str:
    """Folder of a model, or a name on the Hugging Face hub.

    Args:
        hidden: embedders that cannot be chosen by name here.

    Raises:
        UnknownName: the name can be neither.
        ModelError: the folder is missing or incomplete.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(_checked_folder(folder))
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"embedder folder {name} does not exist; give a folder with a model, or `owner/model`."
        )
    if "/" not in name:
        known = [each for each in EMBEDDERS.names() if each not in hidden]
        raise UnknownName(
            f"{unknown_name_message('embedder', name, known)} Other models are named "
            "`owner/model` or by folder."
        )
    return name


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise ModelError(
            f"embedder folder {folder} holds no config.json; give a folder with a saved model."
        )
    if not any(next(folder.rglob(ending), None) for ending in ("*.safetensors", "*.bin")):
        raise ModelError(
            f"embedder folder {folder} holds no weights (*.safetensors or *.bin); "
            "save the model there again, weights included."
        )
    return folder


def _embedder_family(name: str) -> str:
    """Embedder class of a model, by the model type of its folder or by its hub name."""
    settings = Path(name).expanduser() / "config.json"
    if not settings.is_file():
        return "qwen3" if "qwen3-embedding" in name.lower() else "sentence_transformers"
    try:
        model_type = json.loads(settings.read_text(encoding="utf-8")).get("model_type")
    except ValueError as error:
        raise ModelError(f"{settings} is not JSON; save the model there again.") from error
    return "qwen3" if model_type == "qwen3" else "sentence_transformers"
