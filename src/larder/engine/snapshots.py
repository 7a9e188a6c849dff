"""Snapshots of the caches of one model in a store, and the identity of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from larder.cache.sequence import SequenceCache
from larder.core.home import home
from larder.models.checkpoint_files import WEIGHT_PATTERNS
from larder.models.introspection import stored_weights
from larder.models.loader import SEED, LoadedModel
from larder.store.blobs.cache_state import RAW_CODEC
from larder.store.codecs.base import codec_named
from larder.store.digests import key_of
from larder.store.model_identity import (
    ModelIdentity,
    digest_of_files,
    digest_of_weights,
    model_identity,
    read_json_cache,
)
from larder.store.sessions.cache_writer import CacheSnapshot, with_stored_codec
from larder.store.sessions.session_reader import CacheRequirements, LoadedSession
from larder.store.store import Store
from larder.store.stream_controller import StreamController

DIGEST_CACHE_FILE = "digests.json"  # of weight files, by path, size and time of change


class ModelSnapshots:
    """Snapshots of session caches of one model in a store. Thread-safe.

    Measured load and prefill rates are saved under `$LARDER_HOME/rates`, so that a new process
    chooses the faster of the two from the first session on.

    Args:
        codec: name of the codec of keys and values, a file in `store/codecs`.
        streaming: chooses what is loaded of caches that are stored in chunks.

    Raises:
        UnknownName: there is no such codec.
        CacheError: it needs to be trained for the model.
    """

    def __init__(
        self,
        store: Store,
        loaded: LoadedModel,
        codec: str = RAW_CODEC,
        streaming: StreamController = StreamController(),  # noqa: B008, frozen
    ) -> None:
        codec_named(codec).check_model(loaded.decoder.spec.fingerprint)
        self.store, self.codec, self._streaming = store, codec, streaming
        # Snapshots lie in host memory, whatever device the caches are used on.
        self.host_spec = loaded.decoder.spec.on_host
        self.identity = identity_of_model(loaded)

    def snapshot(
        self, policy: str, caches: Sequence[SequenceCache], beside: bytes | None = None
    ) -> CacheSnapshot:
        """Snapshot of the caches of one session.

        Args:
            policy: canonical spelling, sizes filled in.
            beside: as in `CacheSnapshot`.
        """
        first, *others = caches
        return CacheSnapshot(first, self.identity, policy, self.codec, tuple(others), beside)

    def stored_codec(self, caches: Sequence[SequenceCache]) -> str:
        """Name of the codec that caches of one session are stored with."""
        return with_stored_codec(self.snapshot("", caches)).codec

    def load(
        self, principal: str, name: str, policy: str, ids: Sequence[int] | None = None
    ) -> LoadedSession | None:
        """Load a session of this model under a policy, as `SessionStore.load` does.

        Raises:
            Refused: not even the token ids of the session can be loaded.
        """
        self.store.parts.throughput.initialize(read_json_cache(self._rates_path(policy)))
        requirements = CacheRequirements(self.identity, policy, self.host_spec, self._streaming)
        loaded = self.store.sessions.load(principal, name, requirements, ids)
        self.save_rates(policy)
        return loaded

    def record_prefill_time(self, tokens: int, seconds: float) -> None:
        """Record the duration of a prefill for the estimate of the prefill rate."""
        self.store.parts.throughput.read(tokens, seconds)

    def save_rates(self, policy: str) -> None:
        """Save the measured rates for the next process."""
        path = self._rates_path(policy)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.store.parts.throughput.estimates()))
            temporary.replace(path)
        except OSError:
            return  # rates are an optimization: the next process measures them again

    def _rates_path(self, policy: str) -> Path:
        """File of the rates, one per model and policy."""
        return home() / "rates" / f"{key_of('rates', self.identity.key, policy)[:32]}.json"


def identity_of_model(loaded: LoadedModel) -> ModelIdentity:
    """Identity of a model and its tokenizer. The digests of weight files are cached on disk."""
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
        adapters=[_adapter_digest(folder) for folder in loaded.adapters],
        torch=torch.__version__,
        transformers=transformers.__version__,
        numerics=decoder.spec.device.type,
    )


def _adapter_digest(folder: str) -> str:
    """Digest of an adapter: of its files, because those of the model are without it."""
    from larder.models.lora_adapter import adapter_files

    return digest_of_files(adapter_files(folder), home() / DIGEST_CACHE_FILE)


def _weights_digest(loaded: LoadedModel) -> str:
    """Digest of the weights: of their files where the folder is known, else of the tensors."""
    folder = Path(str(files("larder.models") / "seed") if loaded.name == SEED else loaded.name)
    weight_files = [file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)]
    if weight_files:
        return digest_of_files(weight_files, home() / DIGEST_CACHE_FILE)
    return digest_of_weights(stored_weights(loaded.decoder.module))
