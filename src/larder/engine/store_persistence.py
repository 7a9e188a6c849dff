"""Persistence of chats and prefilled conversations: caches saved to a store and restored.

A restored chat continues exactly as the saved one would have continued where the codec is lossless.
The chat log is the source of truth: if the saved caches are unusable, the log is prefilled again,
and the store logs and counts the reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation, PromptLayout
from larder.core.errors import LarderError, UsageError
from larder.core.home import LOCAL_PRINCIPAL
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.engine.engine import Engine
from larder.engine.layer_transfer import LayerTransfer, StoredSender, StoredStates, stored_sender
from larder.engine.persistence import NOT_SAVED, ChatPersistence, ResumeResult
from larder.engine.snapshots import ModelSnapshots, identity_of_model
from larder.engine.stored_variants import StoredVariants
from larder.models.layer_reuse import SharedReading, receive_reading, recorded_states
from larder.models.loader import LoadedModel
from larder.prefill.base import Progress, no_progress
from larder.prefill.contexts import (
    ChunkAnchor,
    ChunkChange,
    ChunkSource,
    ChunkStates,
    ChunkVariant,
    anchors_of,
    append_text,
)
from larder.prefill.layer_reuse import ReusedChunks, SenderChunks, check_range
from larder.session.caches import offload
from larder.session.capacity import resolve_budget
from larder.session.chat_state import ChatState, chat_state_record, restore_chat_state
from larder.session.default_policy import text_kind
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy, parsed_policy
from larder.session.prefill import ModelRuntime
from larder.session.transcript.chat_log import ChatLog, chat_log_record
from larder.session.transcript.chat_log_file import ChatLogStore, open_chat_log
from larder.store.blobs.cache_state import RAW_CODEC
from larder.store.digests import key_of
from larder.store.encryption import Encryption, NoEncryption
from larder.store.model_identity import ModelIdentity
from larder.store.sessions.session_reader import CacheRequirements
from larder.store.store import Store
from larder.store.stream_controller import StreamController

NO_TOKEN = 0  # follows a chunk: a store never returns the last token of a text


class StorePersistence(ChatPersistence):
    """Chats of one tenant and one model: logs in session files, caches in a store.

    Args:
        principal: tenant that owns the chats.
        codec: name of the codec of keys and values, a file in `store/codecs`.
        logs: encryption of the logs.
        streaming: chooses what is loaded of caches that are stored in chunks; what is not is read
            from the log.
        layers: what the model shares with others of its shape, and takes from one.
    """

    def __init__(
        self,
        store: Store,
        loaded: LoadedModel,
        principal: str = LOCAL_PRINCIPAL,
        codec: str = RAW_CODEC,
        logs: Encryption = NoEncryption(),  # noqa: B008, no state
        streaming: StreamController = StreamController(),  # noqa: B008, frozen
        layers: LayerTransfer = LayerTransfer(),  # noqa: B008, frozen
    ) -> None:
        self._logs, self._loaded = logs, loaded
        self._store, self._principal, self._layers = store, principal, layers
        self._snapshots = ModelSnapshots(store, loaded, codec, streaming)

    def open_log(self, name: str | None) -> ChatLogStore:
        return open_chat_log(name, self._logs)

    def load(self, name: str, runtime: ModelRuntime, policy: Policy, log: ChatLog) -> ResumeResult:
        started = time.perf_counter()
        ids = log.prefill_input(log.transcript(runtime.tokenizer)).ids
        self._sender()  # raises what asks for a model that cannot serve this one
        if self._lacks_states(ids):
            return ResumeResult(None, NOT_SAVED)
        try:
            session = self._snapshots.load(self._principal, name, str(policy), ids)
            if session is None or session.cache is None:
                return ResumeResult(None, NOT_SAVED if session is None else session.reason)
            tokens, caches = len(session.ids), [session.cache, *session.others]
            codec, record = self._snapshots.stored_codec(caches), session.record
            former = "" if record.codec == codec else record.codec
            # What was coded coarsely would be so at every level.
            is_damaged = bool(session.reason) and not any(session.levels)
            is_outdated = record.lossless if former else is_damaged
            if session.levels:
                tokens = session.cache.next_position
                caches = [self._read_rest(session.cache, session.ids)]
            seconds = time.perf_counter() - started
            state = restore_chat_state(
                session.transcript, session.ids, caches, runtime, policy, log, seconds
            )
        except LarderError as error:
            return ResumeResult(None, self._store.parts.refusals.note_error(error))
        seconds = time.perf_counter() - started
        return ResumeResult(state, session.reason, tokens, seconds, former, is_outdated)

    def _read_rest(self, cache: SequenceCache, ids: TokenIds) -> SequenceCache:
        """Have the model read what was not loaded of a cache."""
        started, rest = time.perf_counter(), ids[cache.next_position :]
        if not rest:
            return cache
        decoder = self._loaded.decoder
        cache = offload(cache).restore(decoder.spec)
        append_text(decoder, cache, rest)
        self._snapshots.record_prefill_time(len(rest), time.perf_counter() - started)
        return cache

    def save(self, name: str, state: ChatState) -> str:
        memory = state.memory
        ids = state.log.prefill_input(memory.transcript).ids
        try:
            snapshot = self._snapshots.snapshot(str(memory.policy), tuple(memory.caches.copies()))
            record = self._store.sessions.save(
                self._principal, name, ids, snapshot, transcript=chat_state_record(state)
            )
        except LarderError as error:
            return self._store.parts.unwritten.note_error(error)
        return "" if record.spans else "tokens only"

    def record_prefill_time(self, memory: ConversationMemory) -> None:
        figures = memory.figures
        self._snapshots.record_prefill_time(figures.context_tokens, figures.prefill_seconds)
        self._snapshots.save_rates(str(memory.policy))

    def chunks(self) -> ChunkSource:
        kept, sender = self._layers.state_layers, self._sender()
        own = StoreChunks(self._store, self._loaded, self._principal, kept)
        if sender is None:
            return own
        decoder = self._loaded.decoder
        theirs = StoreChunks(
            self._store, self._loaded, self._principal, sender.layers, sender.identity
        )
        return ReusedChunks(own, SenderChunks(theirs, decoder.spec), decoder, self._layers.layers)

    def receive(
        self, name: str, runtime: ModelRuntime, policy: Policy, log: ChatLog
    ) -> ResumeResult:
        sender, started = self._sender(), time.perf_counter()
        if sender is None:
            return ResumeResult(None, NOT_SAVED)
        check_shared_policy(policy)
        decoder, layers = self._loaded.decoder, self._layers.layers
        check_range(decoder, layers, sender.layers)
        ids = log.prefill_input(log.transcript(runtime.tokenizer)).ids
        requirements = CacheRequirements(sender.identity, str(policy), decoder.spec.on_host)
        try:
            session = self._store.sessions.load(self._principal, name, requirements, ids)
            states = self._states(sender.identity).find(decoder.spec, (), ids)
            if session is None or session.cache is None or session.ids != ids:
                return ResumeResult(None, NOT_SAVED if session is None else session.reason)
            if states is None and layers[0]:
                return ResumeResult(None, NOT_SAVED)
            entries = ChunkEntries.of(session.cache, 0, len(ids)).to(decoder.spec.device)
            reading = SharedReading(ids, entries, {} if states is None else dict(states.by_layer))
            cache = SequenceCache(decoder.spec, "dense")
            cache.allocate(len(ids))
            receive_reading(decoder, reading, layers).append_to(cache)
            seconds = time.perf_counter() - started
            state = restore_chat_state(
                session.transcript, ids, [cache], runtime, policy, log, seconds
            )
        except LarderError as error:
            return ResumeResult(None, self._store.parts.refusals.note_error(error))
        computed = f"{self._layers.sender}, layers {layers[0]} to {layers[1] - 1} computed again,"
        return ResumeResult(state, "", len(ids), seconds, sender=computed)

    @contextmanager
    def share_states(self, policy: Policy, ids: TokenIds) -> Iterator[None]:
        if not self._layers.state_layers:
            yield
            return
        check_shared_policy(policy)
        with recorded_states(self._loaded.decoder, self._layers.state_layers) as recorder:
            yield
        states = ChunkStates(recorder.states())
        assert all(own.shape[1] == len(ids) for own in states.by_layer.values())
        self._states(identity_of_model(self._loaded)).add((), ids, states)

    def _sender(self) -> StoredSender | None:
        """Model that chunks and saved caches are taken from."""
        if not self._layers.sender:
            return None
        own = identity_of_model(self._loaded)
        return stored_sender(self._store, self._principal, self._layers.sender, own)

    def _states(self, identity: ModelIdentity) -> StoredStates:
        return StoredStates(self._store, self._principal, identity)

    def _lacks_states(self, ids: TokenIds) -> bool:
        """True if a text is to be shared, but not all of its hidden states are saved."""
        wanted = set(self._layers.state_layers)
        if not wanted:
            return False
        spec, identity = self._loaded.decoder.spec.on_host, identity_of_model(self._loaded)
        found = self._states(identity).find(spec, (), ids)
        return found is None or not wanted <= found.by_layer.keys()


def check_shared_policy(policy: Policy) -> None:
    """Check that the saved cache of a text under a policy can serve another model.

    Raises:
        UsageError: it is not the whole text, exactly.
    """
    if str(policy) != str(parsed_policy("full")):
        raise UsageError(
            f"A saved cache serves another model under the policy full, which keeps all of a text, "
            f"but this is {policy}: take full, or give the text as a context."
        )


def prefill_or_restore(
    engine: Engine,
    keeper: ChatPersistence,
    conversation: Conversation,
    prompts: Mapping[str, str],
    progress: Progress = no_progress,
) -> tuple[ConversationMemory, ResumeResult]:
    """Restore a saved prefill of a conversation, or prefill and save it.

    Of contexts that the policy reads apart, each is restored or saved by itself. A prefill that
    was saved with another codec is saved with that of `keeper` from then on: as it is restored, if
    it was lossless, else after another prefill.

    Args:
        prompts: prompts by name, as for `Engine.read`; they are part of the saved name.

    Raises:
        LarderError: as `Engine.read` does.
    """
    chosen = engine.policy_for(text_kind(conversation, engine.sizes.budget is not None))
    if conversation.form is PromptLayout.CONTEXTS and chosen.schedule.cache_form:
        memory = engine.read(conversation, prompts, progress, chunks=keeper.chunks())
        return memory, ResumeResult(None, NOT_SAVED)
    runtime, log = engine.runtime, ChatLog(replace(conversation, questions=()))
    ids = log.transcript(runtime.tokenizer).ids
    if not ids:
        return engine.read(conversation, prompts, progress), ResumeResult(None, NOT_SAVED)
    tokens = resolve_budget(chosen, engine.sizes.budget, len(ids), runtime.decoder.spec)
    policy = chosen.with_sizes(tokens, engine.sizes.block, len(ids))
    prompt_fields = [text for name in sorted(prompts) for text in (name, prompts[name])]
    fields = [json.dumps(chat_log_record(log)), str(policy), *prompt_fields]
    name = f"reading {key_of('reading', *fields)[:32]}"
    resumed = keeper.load(name, runtime, policy, log)
    if resumed.codec and not resumed.is_outdated:  # of a lossy codec
        resumed = ResumeResult(None, "codec", codec=resumed.codec)
    if resumed.state is not None:
        if resumed.is_outdated:
            keeper.save(name, resumed.state)
        return replace(resumed.state.memory, conversation=conversation), resumed
    if resumed.state is None:
        received = keeper.receive(name, runtime, policy, log)
        if received.state is not None:  # approximate, so that it is not saved
            return replace(received.state.memory, conversation=conversation), received
    with keeper.share_states(policy, ids):
        memory = engine.read(conversation, prompts, progress)
    keeper.record_prefill_time(memory)
    keeper.save(name, ChatState(memory, log))
    return memory, resumed


class StoreChunks(ChunkSource):
    """Chunks of one tenant and one model in a store. Safe from threads and processes.

    What cannot be written is counted by the store, and read again the next time.

    Args:
        principal: tenant that owns the chunks.
        state_layers: layers before which hidden states are kept for other models.
        identity: of another model of the same shape, whose chunks these are; None for that of
            `loaded`.

    Examples:
        >>> chunks = StoreChunks(store, engine.loaded)
        >>> memory = engine.under("cacheblend").read(contexts=texts, chunks=chunks)
    """

    def __init__(
        self,
        store: Store,
        loaded: LoadedModel,
        principal: str = LOCAL_PRINCIPAL,
        state_layers: Sequence[int] = (),
        identity: ModelIdentity | None = None,
    ) -> None:
        self._store, self._principal, self._state_layers = store, principal, tuple(state_layers)
        self._spec, self._identity = loaded.decoder.spec, identity or identity_of_model(loaded)
        self._variants = StoredVariants(store, principal, self._identity)
        self._states = StoredStates(store, principal, self._identity)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._state_layers

    def states(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkStates | None:
        return self._states.find(spec, prefix, ids)

    def add_states(self, prefix: TokenIds, ids: TokenIds, states: ChunkStates) -> None:
        self._states.add(prefix, ids, states)

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        text = prefix + ids
        cache = self._store.prefixes.match_prefix(
            self._principal, (*text, NO_TOKEN), self._identity, spec
        )
        if cache is None or cache.next_position < len(text):
            return None
        return ChunkEntries.of(cache, len(prefix), len(text))

    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        try:
            self._store.prefixes.save_text(self._principal, prefix + ids, cache, self._identity)
        except LarderError as error:
            self._store.parts.unwritten.note_error(error)

    def variants(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> list[ChunkVariant]:
        return self._variants.variants(spec, prefix, ids)

    def add_variant(self, prefix: TokenIds, ids: TokenIds, variant: ChunkVariant) -> None:
        self._variants.add_variant(self._spec, prefix, ids, variant)

    def anchors(self, spec: ModelSpec, prefix: TokenIds, index: int) -> list[ChunkAnchor]:
        changes = self._variants.changes(spec, prefix, index)
        return anchors_of(
            changes, [self.find(spec.on_host, prefix, change.ids) for change in changes]
        )

    def add_anchor(self, prefix: TokenIds, index: int, anchor: ChunkAnchor) -> None:
        change = ChunkChange(anchor.ids, anchor.change)
        self._variants.add_change(self._spec, prefix, index, change)
