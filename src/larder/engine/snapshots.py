"""The caches of one model in a store: who has made them, and which way back is the quicker one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch

from larder.cache.sequence import SequenceCache
from larder.core.settings import home
from larder.models.loader import SEED, WEIGHT_PATTERNS, LoadedModel
from larder.store.blobs.cache_state import RAW_CODEC
from larder.store.digests import key_of
from larder.store.model_identity import (
    ModelIdentity,
    digest_of_files,
    digest_of_weights,
    model_identity,
)
from larder.store.sessions.cache_io import CacheSnapshot
from larder.store.sessions.session_store import CacheRequirements
from larder.store.sessions.session_store import LoadedSession as Found
from larder.store.store import Store


class ModelSnapshots:
    """Makes snapshots of caches and asks for them. Safe from threads.

    How fast loading and reading go is remembered under `$LARDER_HOME/rates`, so that the quicker
    way is taken from the first time on.

    Args:
        codec: how keys and values are spelled; a file in `store/codecs`.
    """

    def __init__(self, store: Store, loaded: LoadedModel, codec: str = RAW_CODEC) -> None:
        self.store, self.codec = store, codec
        # Caches rest in host memory, whatever they are used on.
        self.resting = replace(loaded.decoder.spec, device=torch.device("cpu"))
        self.identity = identity_of_model(loaded)

    def of(
        self, policy: str, caches: Sequence[SequenceCache], beside: bytes | None = None
    ) -> CacheSnapshot:
        """A snapshot of the caches of one session.

        Args:
            policy: canonical spelling, sizes filled in.
            beside: as in `CacheSnapshot`.
        """
        first, *others = caches
        return CacheSnapshot(first, self.identity, policy, self.codec, tuple(others), beside)

    def load(
        self, principal: str, name: str, policy: str, ids: Sequence[int] | None = None
    ) -> Found | None:
        """As `Sessions.load`, for this model under a policy.

        Raises:
            Refused: not even the tokens can be had.
        """
        self.know(policy)
        asking = CacheRequirements(self.identity, policy, self.resting)
        found = self.store.sessions.load(principal, name, asking, ids)
        self.remember(policy)
        return found

    def note_reading(self, tokens: int, seconds: float) -> None:
        """The model has read so many tokens in that time."""
        self.store.parts.throughput.read(tokens, seconds)

    def know(self, policy: str) -> None:
        """Begin with what was measured before, where nothing is known yet."""
        self.store.parts.throughput.know(_saved_rates(self._rates_path(policy)))

    def remember(self, policy: str) -> None:
        """Write down what is known, for the next process."""
        path = self._rates_path(policy)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.store.parts.throughput.known()))
            temporary.replace(path)
        except OSError:
            return  # it is measured again

    def _rates_path(self, policy: str) -> Path:
        """Reading takes as long as model and policy have it take."""
        return home() / "rates" / f"{key_of('rates', self.identity.key, policy)[:32]}.json"


def _saved_rates(path: Path) -> dict[str, float]:
    """What was measured before; nothing where that cannot be read."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


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
