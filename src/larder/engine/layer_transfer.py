"""Chunks and saved caches of one model for another of its shape, in memory or in a store.

The models must agree in all that entries mean (tokenizer, rotation, shape and type of keys and
values), and differ in weights; `larder.prefill.layer_reuse` computes what differs. In a store a
sender is found by the name of its model, among those of the tenant:

    sender NAME     session without a cache; its transcript names the identities that share
    states KEY      session without a cache; its transcript holds the hidden states of a text
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.errors import LarderError, ModelError, UsageError
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.engine.snapshots import identity_of_model
from larder.models.layer_reuse import LayerRange
from larder.models.loader import LoadedModel
from larder.prefill.contexts import STATES, ChunkSource, ChunkStates
from larder.prefill.layer_reuse import ReusedChunks, SenderChunks
from larder.store.blobs.container import pack_container, unpack_container
from larder.store.digests import canonical_json, key_of
from larder.store.model_identity import ModelIdentity
from larder.store.store import Store

NAME_DIGITS = 32
# Properties in which sender and receiver must agree, with their names in messages.
COMMON = {
    "tokenizer": "tokenizer",
    "rope": "rotation of keys",
    "layers": "heads, sizes or windows of layers",
    "kv_dtype": "type of keys and values",
    "attention": "attention",
}


@dataclass(frozen=True)
class LayerTransfer:
    """Layers that a model shares with others of its shape, and those that it takes from one.

    Args:
        state_layers: layers before which hidden states are kept for others.
        sender: name of the model whose chunks and saved caches are taken; empty for none.
        layers: range of layers that are computed again of what is taken.
    """

    state_layers: tuple[int, ...] = ()
    sender: str = ""
    layers: LayerRange = (0, 0)


def reused_chunks(
    own: ChunkSource,
    chunks: ChunkSource,
    sender: LoadedModel,
    receiver: LoadedModel,
    layers: LayerRange,
) -> ReusedChunks:
    """Chunks of a receiver, with those that it lacks taken from another model (DroidSpeak).

    Args:
        own: chunks that the receiver has read.
        chunks: chunks of the sender, such as `ChunkMemory(2**28, state_layers=(10,))`.
        layers: range of layers that the receiver computes, [start, stop); the sender keeps states
            before the first, unless it is layer 0.

    Raises:
        ModelError: the models cannot share entries, or the range has no states to begin with.

    Examples:
        >>> kept = ChunkMemory(2**28, state_layers=(10,))
        >>> memory = base.under("cacheblend").read(contexts=texts, chunks=kept)
        >>> taken = reused_chunks(ChunkMemory(), kept, base.loaded, tuned.loaded, (10, 30))
        >>> memory = tuned.under("cacheblend").read(contexts=texts, chunks=taken)
    """
    check_sender(identity_of_model(sender), identity_of_model(receiver))
    from_sender = SenderChunks(chunks, sender.decoder.spec)
    return ReusedChunks(own, from_sender, receiver.decoder, layers)


def check_sender(sender: ModelIdentity, receiver: ModelIdentity) -> None:
    """Check that entries of one model mean the same to another.

    Raises:
        ModelError: they do not, or both are one model.
    """
    differing = sender.differences(receiver)
    if not differing:
        raise ModelError(
            f"Contexts of {sender.model} are asked for, which is this model itself: leave the "
            "other model out."
        )
    if barriers := [COMMON[name] for name in differing if name in COMMON]:
        raise ModelError(
            f"Entries of {sender.model} cannot serve {receiver.model}: the models differ in "
            f"{', '.join(barriers)}. Take models that were tuned from one base, loaded in one type."
        )


@dataclass(frozen=True)
class StoredSender:
    """Model that shares what it has read.

    Args:
        layers: layers before which its hidden states are kept.
    """

    identity: ModelIdentity
    layers: tuple[int, ...]


@dataclass(frozen=True)
class StoredStates:
    """Hidden states of texts of one tenant and one model in a store. Safe from threads and
    processes.

    Args:
        principal: tenant that owns them.
        identity: of the model that computed them.
    """

    store: Store
    principal: str
    identity: ModelIdentity

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkStates | None:
        """States of a text behind a prefix, on the device of `spec`; None if they cannot be read,
        which the store counts."""
        try:
            read = self.store.sessions.read_transcript(self.principal, self._name(prefix, ids))
            if read is None:
                return None
            tensors, _ = unpack_container(read[1])
        except LarderError:
            return None
        states = {int(layer): own.clone() for layer, own in tensors.items()}
        return ChunkStates(states).to(spec.device)

    def add(self, prefix: TokenIds, ids: TokenIds, states: ChunkStates) -> None:
        """Store the states of a text, and the model among those that share; what cannot be written
        is counted by the store."""
        tensors = {str(layer): own for layer, own in states.to("cpu").by_layer.items()}
        data, name = pack_container(tensors, {}), self._name(prefix, ids)
        try:
            self.store.sessions.save(self.principal, name, ids, transcript=data)
            self._add_sender(ids, tuple(sorted(states.by_layer)))
        except LarderError as error:
            self.store.parts.unwritten.note_error(error)

    def _add_sender(self, ids: TokenIds, layers: tuple[int, ...]) -> None:
        """List the model as the newest of its name that shares; no write where it is already."""
        senders = stored_senders(self.store, self.principal, self.identity.model)
        own = StoredSender(self.identity, layers)
        if senders and senders[-1] == own:
            return
        others = [one for one in senders if one.identity.differences(self.identity)]
        record = [
            {"identity": one.identity.to_dict(), "layers": list(one.layers)}
            for one in (*others, own)
        ]
        name, listed = _sender_name(self.identity.model), canonical_json(record).encode()
        self.store.sessions.save(self.principal, name, ids, transcript=listed)

    def _name(self, prefix: TokenIds, ids: TokenIds) -> str:
        """Name of the session of a text."""
        return f"{STATES} {key_of(STATES, self.identity.key, repr((prefix, ids)))[:NAME_DIGITS]}"


def stored_senders(store: Store, principal: str, name: str) -> list[StoredSender]:
    """Models of a name that share what they have read with a tenant, the newest last."""
    try:
        read = store.sessions.read_transcript(principal, _sender_name(name))
    except LarderError:
        return []  # counted by the store
    if read is None:
        return []
    return [
        StoredSender(ModelIdentity.from_dict(own["identity"]), tuple(own["layers"]))
        for own in json.loads(read[1])
    ]


def stored_sender(store: Store, principal: str, name: str, receiver: ModelIdentity) -> StoredSender:
    """Newest model of a name that shares what it has read, other than the receiver.

    Raises:
        UsageError: there is none.
        ModelError: its entries cannot serve the receiver.
    """
    senders = stored_senders(store, principal, name)
    if not senders:
        raise UsageError(
            f"The store has nothing that {name} shares: read the texts with it first, and keep "
            "them with the states before a layer (share_layer)."
        )
    others = [one for one in senders if one.identity.differences(receiver)]
    chosen = (others or senders)[-1]
    check_sender(chosen.identity, receiver)
    return chosen


def _sender_name(model: str) -> str:
    return f"sender {key_of('sender', model)[:NAME_DIGITS]}"


def parse_layers(text: str) -> LayerRange:
    """Range of layers in the spelling START-STOP, with STOP left out of the range.

    Raises:
        UsageError: it is none.
    """
    start, mark, stop = text.partition("-")
    if mark and start.isdecimal() and stop.isdecimal() and int(start) < int(stop):
        return int(start), int(stop)
    raise UsageError(
        f"A range of layers is START-STOP, such as 10-30 for layers 10 to 29, got {text!r}."
    )


def check_state_layers(layers: Sequence[int]) -> None:
    """Check layers before which states are kept.

    Raises:
        UsageError: one is negative, or 0, before which are embeddings, which each model has.
    """
    for layer in layers:
        if layer < 1:
            raise UsageError(
                f"Layer {layer} cannot be shared: states are kept before layer 1 or a later one; a "
                "range that starts at layer 0 needs none."
            )
