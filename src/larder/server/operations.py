"""Table of the operations of an engine client.

A new operation is a function here: its docstring is the description of its endpoint, and the local
engine client, replicas and HTTP serve it without further edits. The path of a new `GET` or `DELETE`
ends with the session's name; below a session's own path its end would be reserved in
`core/session_name.py`, too. A function that names a session raises `ApiError` 404
`session_not_found` if there is none, and 409 `session_busy` if it would change a session that is
answering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from larder.core.session_name import root_name
from larder.server.api_errors import invalid_request, validate_session_name
from larder.server.engine_context import EngineContext
from larder.server.engine_core import EngineCore
from larder.server.http.json_body import JsonBody, Text
from larder.server.operation import Endpoint, Operation, Placement, on_model_thread, operation
from larder.server.persistence import session_file
from larder.server.request import ChatMessage
from larder.server.session_info import (
    CachedPositions,
    ServedModel,
    SessionInfo,
    SessionTranscript,
    cached_positions,
    session_info,
    session_transcript,
)
from larder.server.session_state import SessionState
from larder.server.stats import ServerStats, collect_stats, sum_stats
from larder.session.capacity import beyond_budget

SESSIONS = "/v1/sessions"
SESSION = f"{SESSIONS}/{{name:path}}"


# The server.


@operation(Placement.ANY, is_constant=True)
def models(context: EngineContext) -> tuple[ServedModel, ...]:
    """The served model under each of its names."""
    core = context.core
    model = ServedModel(
        name=core.names[0],
        policy=str(core.serving),
        context_tokens=core.context,
        made=context.made,
        budget_tokens=core.serving.budget_tokens,
        beyond_budget=beyond_budget(core.engine.policy, core.engine.loaded.decoder.spec),
        template_variables=core.engine.tokenizer.template_variables,
        takes_images=core.images.takes_images,
        takes_tools=core.engine.tokenizer.takes_tools,
        answer_form=context.answer_form,
    )
    return tuple(replace(model, name=name, primary=core.names[0]) for name in core.names)


@operation(Placement.ANY)
def tokenize(context: EngineContext, text: str) -> tuple[int, ...]:
    """Token ids of a text, without a chat template."""
    context.core.check_length(text, param="prompt")
    return context.call(lambda: context.core.engine.tokenizer.encode(text))


@operation(Placement.ANY)
def count_prompt(
    context: EngineContext, turns: Sequence[ChatMessage], images: Mapping[str, bytes]
) -> int:
    """Number of tokens of a conversation, up to the beginning of its next answer.

    Raises:
        ApiError: 400: there is no message to answer, or its images cannot be read.
    """
    core = context.core
    core.check_length(*(turn.text for turn in turns))
    return context.call(lambda: len(core.sessions.prompt_ids((), tuple(turns), images)))


@operation(Placement.ANY)
def detokenize(context: EngineContext, ids: Sequence[int]) -> str:
    """Text of token ids.

    Raises:
        ApiError: 400 `invalid_request`, an id is outside the vocabulary.
    """
    engine = context.core.engine
    wrong = [token for token in ids if not 0 <= token < engine.loaded.decoder.vocab_size]
    if wrong:
        raise invalid_request(
            f"Token id {wrong[0]} is outside the vocabulary of "
            f"{engine.loaded.decoder.vocab_size}: send ids of this model.",
            "tokens",
        )
    return context.call(lambda: engine.tokenizer.decode(ids))


@operation(Placement.ANY, is_constant=True)
def tokenizer_info(context: EngineContext) -> Mapping[str, str | None]:
    """Texts of the special tokens, and the chat template."""
    tokenizer = context.core.engine.tokenizer.tokenizer
    return {
        "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.bos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.get_chat_template() if tokenizer.chat_template else None,
    }


@operation(Placement.ALL, merge=sum_stats)
def stats(context: EngineContext) -> ServerStats:
    """Statistics of the server."""
    return context.call(lambda: collect_stats(context.core))


@operation(Placement.ALL, merge=any)
def is_healthy(context: EngineContext) -> bool:
    """True if the model's thread is alive and accepts requests."""
    return context.thread.is_alive


def merge_problems(problems: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Problems of all replicas, each named once."""
    return tuple(sorted({each for several in problems for each in several}))


@operation(Placement.ALL, merge=merge_problems)
def problems(context: EngineContext) -> tuple[str, ...]:
    """Present problems, one word each: `turns_not_durable` if the store lacks answered turns, or
    has rejected one lately."""
    return ("turns_not_durable",) if context.core.unwritten.is_degraded else ()


# Sessions.


def merge_sessions(listed: Sequence[Sequence[SessionInfo]]) -> tuple[SessionInfo, ...]:
    """Sessions of all replicas, most recently used first; of several states of one session, the
    one with the highest epoch, then the most recently used."""
    newest: dict[str, SessionInfo] = {}
    for view in (view for views in listed for view in views):
        known = newest.setdefault(view.name, view)
        newest[view.name] = max(known, view, key=lambda each: (each.epoch, each.last_used))
    return tuple(sorted(newest.values(), key=lambda each: -each.last_used))


def sessions_json(_: str, views: Sequence[SessionInfo]) -> dict[str, Any]:
    """List of sessions as JSON."""
    return {"object": "list", "data": [view.as_json() for view in views]}


@operation(
    Placement.ALL,
    merge=merge_sessions,
    endpoint=Endpoint("GET", SESSIONS, name="list_sessions", response=sessions_json),
)
def sessions(context: EngineContext, tenant: str) -> tuple[SessionInfo, ...]:
    """List the sessions of the tenant, the most recently used first."""
    resident = context.call(lambda: tuple(map(session_info, context.core.sessions.of(tenant))))
    names = {view.name for view in resident}
    stored = context.persistence.list_sessions(tenant)
    return merge_sessions([resident, [view for view in stored if view.name not in names]])


@operation(endpoint=Endpoint("GET", SESSION, name="retrieve"))
@on_model_thread
def session(core: EngineCore, tenant: str, name: str) -> SessionTranscript:
    """Retrieve a session."""
    return session_transcript(core.find(tenant, name))


@operation(endpoint=Endpoint("GET", f"{SESSION}/kept"))
def kept(context: EngineContext, tenant: str, name: str) -> CachedPositions:
    """Map of cached positions: those that each layer and head holds or has parked, as
    [start, stop) ranges, with episodes, turns and the text of each token. The cache does not
    move: `tier` tells whether it is only in the store."""

    def positions_and_turns() -> CachedPositions:
        found = context.core.find(tenant, name)
        positions, transcript = cached_positions(found), session_transcript(found)
        texts = context.token_texts.texts(found.transcript.ids) if positions.tokens else ()
        return replace(positions, texts=texts, turns=transcript.turns, spans=transcript.spans)

    with context.resident(tenant, name):
        return context.call(positions_and_turns)


@operation()
@on_model_thread
def open(
    core: EngineCore, tenant: str, name: str, turns: Sequence[ChatMessage] = ()
) -> SessionInfo:
    """Create a session that begins with these messages; nothing is computed before its first
    request.

    Raises:
        ApiError: 409 `session_exists`.
    """
    return session_info(core.open(tenant, name, turns))


@operation(endpoint=Endpoint("POST", f"{SESSION}/pin"))
def pin(context: EngineContext, tenant: str, name: str) -> SessionInfo:
    """Pin a session: it is evicted after all that are not pinned."""
    return _set_pinned(context, tenant, name, True)


@operation(endpoint=Endpoint("POST", f"{SESSION}/unpin"))
def unpin(context: EngineContext, tenant: str, name: str) -> SessionInfo:
    """Unpin a session."""
    return _set_pinned(context, tenant, name, False)


@operation(endpoint=Endpoint("POST", f"{SESSION}/release"))
def release(context: EngineContext, tenant: str, name: str) -> SessionInfo:
    """Free the memory of a session; its transcript stays."""
    return _moved(context, tenant, name, context.core.admin.release)


@operation(endpoint=Endpoint("POST", f"{SESSION}/prefetch"))
def prefetch(context: EngineContext, tenant: str, name: str) -> SessionInfo:
    """Restore a session's cache to the device."""
    return _moved(context, tenant, name, context.core.admin.prefetch)


@operation(endpoint=Endpoint("POST", f"{SESSION}/compact"))
def compact(context: EngineContext, tenant: str, name: str) -> SessionInfo:
    """Restore a session's cache to the device within its budget, and free all slack."""
    with context.resident(tenant, name):
        view = _moved(context, tenant, name, context.core.admin.compact)
        context.persistence.compact_history(tenant, name)
        return view


class ForkRequest(JsonBody):
    """Body of a fork request; without a name the server chooses one."""

    name: Text | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `fork`."""
        name = None if self.name is None else validate_session_name(self.name, "name")
        return {"new_name": name}


@operation(endpoint=Endpoint("POST", f"{SESSION}/fork", body=ForkRequest))
def fork(
    context: EngineContext, tenant: str, name: str, new_name: str | None = None
) -> SessionInfo:
    """Fork a session: create another one in the same state."""
    core, candidates = context.core, context.candidates
    family = candidates.family(tenant, name) if new_name is None else ()

    def forked() -> SessionInfo:
        if family:
            core.sessions.reserve_names(tenant, root_name(name), family)
        return session_info(core.fork(tenant, name, new_name))

    with context.resident(tenant, name, new_name):
        return context.call(forked)


@operation(endpoint=Endpoint("POST", f"{SESSION}/export", response=lambda _, content: content))
def export(context: EngineContext, tenant: str, name: str) -> bytes:
    """Export a session as a file."""
    core = context.core
    with context.resident(tenant, name):
        transcript = context.call(lambda: session_file.take_snapshot(core.find(tenant, name)))
        return session_file.encode(transcript, core.engine.loaded.decoder.spec.fingerprint)


@operation(endpoint=Endpoint("POST", f"{SESSION}/import", name="import_session"))
def import_(context: EngineContext, tenant: str, name: str, data: bytes) -> SessionInfo:
    """Create a session from an exported file, which is the body."""
    core = context.core
    limit = session_file.SessionFileLimit(session_file.IMPORT_BYTES, core.context)
    transcript = core.restorer.decode(data, limit=limit)
    with context.resident(tenant, name):
        return context.call(lambda: session_info(core.import_(tenant, name, transcript)))


def deleted_json(name: str, remaining: Sequence[str]) -> dict[str, Any]:
    """Deletion of a session as JSON."""
    return {"id": name, "object": "session.deleted", "deleted": True, "branches": list(remaining)}


@operation(endpoint=Endpoint("DELETE", SESSION, name="delete", response=deleted_json))
def remove(
    context: EngineContext, tenant: str, name: str, branches: bool = False
) -> tuple[str, ...]:
    """Delete a session from every tier; with `branches=true` its branches, too.

    A branch is created by a request that shares a prefix with the session and then diverges. The
    answer names the remaining branches.
    """
    core, persistence, to_load = context.core, context.persistence, [name]
    if branches and root_name(name) == name:
        to_load += persistence.branches(tenant, name)
    elif root_name(name) == name:
        to_load += context.candidates.family(tenant, name)

    def removed() -> tuple[list[str], list[str], list[str], list[Future[None]]]:
        unloaded = [each for each in unreadable if not core.sessions.has(tenant, each)]
        made = core.sessions.branches(tenant, name) + [each for each in unloaded if each != name]
        wanted = [name, *(made if branches else ())]
        if len(wanted) > 1 and not (name in unloaded or core.sessions.has(tenant, name)):
            wanted.remove(name)  # the root is removed already, only branches are left
        deletions = core.remove(tenant, *(each for each in wanted if each not in unloaded))
        context.responses.forget(tenant, wanted)
        context.removals.begin(tenant, wanted)
        return wanted, [] if branches else made, unloaded, deletions

    with core.residency_locks.hold(tenant, name):
        # Sessions that cannot be read can be removed.
        unreadable = context.candidates.restore_candidates(tenant, to_load)
        wanted, remaining, unloaded, deletions = context.call(removed)
    discarded = (persistence.discard(tenant, each) for each in wanted if each in unloaded)
    deletions += [future for future in discarded if future is not None]
    wait(deletions)
    context.removals.end(tenant, wanted)
    for future in deletions:
        future.result()
    return tuple(remaining)


def _set_pinned(context: EngineContext, tenant: str, name: str, is_pinned: bool) -> SessionInfo:
    core = context.core

    def pin() -> tuple[SessionState, bool, Future[None] | None]:
        session = core.find(tenant, name)
        before, session.usage.is_pinned = session.usage.is_pinned, is_pinned
        written = context.persistence.pin(session)
        core.completions.track_write(session, written, lambda _: None)
        return session, before, written

    with context.resident(tenant, name):
        session, before, written = context.call(pin)
        if written is not None:
            if written.exception() is not None:
                context.call(partial(setattr, session.usage, "is_pinned", before))
            written.result()
        return context.call(lambda: session_info(session))


def _moved(
    context: EngineContext,
    tenant: str,
    name: str,
    move: Callable[[SessionState], Future[SessionState]],
) -> SessionInfo:
    """Wait until a session has moved, while other requests are answered."""
    with context.resident(tenant, name):
        session = context.call(lambda: move(context.core.idle(tenant, name))).result()
        return context.call(lambda: session_info(session))


OPERATIONS = {each.name: each for each in tuple(vars().values()) if isinstance(each, Operation)}
