"""Who a loaded model is, in everything that its saved caches depend on."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from larder.core.settings import home
from larder.models.loader import SEED, WEIGHT_PATTERNS, LoadedModel
from larder.store.model_identity import (
    ModelIdentity,
    digest_of_files,
    digest_of_weights,
    model_identity,
)

DIGEST_CACHE_FILE = "digests.json"  # of weight files, by path, size and time of change


def identity_of_model(loaded: LoadedModel) -> ModelIdentity:
    """The identity of a model and its tokenizer. Weight files are read once in their life."""
    import torch
    import transformers

    decoder, tokenizer = loaded.decoder, loaded.tokenizer
    template = tokenizer.chat_template or ""
    return model_identity(
        decoder.spec,
        decoder.module.config.to_dict(),
        _weights_digest(loaded),
        tokenizer.backend_tokenizer.to_str(),
        model=loaded.name,
        chat_template=template if isinstance(template, str) else json.dumps(template),
        torch=torch.__version__,
        transformers=transformers.__version__,
        numerics=decoder.spec.device.type,
    )


def _weights_digest(loaded: LoadedModel) -> str:
    """Digest of the weights: of their files, where they come from a folder that is known."""
    folder = Path(str(files("larder.models") / "seed") if loaded.name == SEED else loaded.name)
    found = [file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)]
    if found:
        return digest_of_files(found, home() / DIGEST_CACHE_FILE)
    return digest_of_weights(loaded.decoder.module.named_parameters())
