"""Models that `larder serve` serves: one, and adapters of it under names of their own."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from larder.cli.errors import SCHEMA, print_document
from larder.core.errors import InputError, UsageError

if TYPE_CHECKING:
    from larder.cli.serve import ServeOptions
    from larder.core.progress import ProgressStage
    from larder.models.loader import LoadedModel
    from larder.server.engine_client import EngineClient, LocalEngineClient
    from larder.server.model_router import ContextTransfer
    from larder.server.persistence.base import SessionLocks
    from larder.server.session_info import ServedModel
    from larder.store.ledger import ByteBudgets
    from larder.store.store import Store

MAX_TEMPLATE_BYTES = 256 << 10
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True)
class AdapterFolders:
    """Folders of adapters.

    Args:
        own: of the adapter that the model always has; None for none.
        named: of those that requests choose, by name.
    """

    own: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


def split_adapters(options: Sequence[str]) -> AdapterFolders:
    """Folders of the values of `--adapter`.

    Raises:
        UsageError: a name is malformed or occurs twice, or there are two adapters without.
    """
    own, named = list[str](), dict[str, str]()
    for text in options:
        name, mark, folder = text.partition("=")
        if not mark or Path(text).is_dir():
            own.append(text)
            continue
        if NAME.fullmatch(name) is None or not folder:
            raise UsageError(
                f"--adapter {text!r} is not NAME=FOLDER: a name is 1 to 128 letters, digits, dots, "
                "dashes, slashes and underscores."
            )
        if name in named:
            raise UsageError(f"--adapter {name}=... is given twice: give each its own name.")
        named[name] = folder
    if len(own) > 1:
        raise UsageError(
            "--adapter is given twice without a name: give NAME=FOLDER, so that requests can "
            "choose by model."
        )
    return AdapterFolders(own[0] if own else None, named)


def check_policy(options: ServeOptions) -> None:
    """Validation of the policy, as far as it needs no model.

    Raises:
        UsageError: the policy needs its question before it reads, or is malformed.
    """
    from larder.cli.question_run import QUESTION_PROMPT, check_model_options

    if QUESTION_PROMPT in check_model_options(options).scorer.required_prompts():
        raise UsageError(
            f"--policy {options.policy} needs the question before prefill, and a server reads "
            "conversations before they are asked: take a policy without it, such as kvzip."
        )


def check_model_files(options: ServeOptions) -> None:
    """Validation of the chat template, parsers and adapters before a model loads.

    Raises:
        UsageError, InputError: the template, a parser or a name cannot be used.
        ModelError: a folder holds no adapter.
    """
    from larder.models.lora_adapter import check_adapter_folder
    from larder.server.answer_form import AnswerForm
    from larder.session.policy import parsed_policy

    AnswerForm(options.tool_call_parser or "", options.reasoning_parser or "")
    _check_served_names(options.served_model_name or ())
    if options.chat_template is not None:
        read_template(options.chat_template)
    folders = split_adapters(options.adapter or ())
    served = ((options.served_model_name or [options.model])[0], *folders.named)
    for transfer in context_transfers(options):
        transfer.check(served, parsed_policy(options.policy))
    names = {*folders.named}
    if taken := names & {options.model, *(options.served_model_name or ())}:
        raise UsageError(
            f"--adapter {min(taken)}=...: the model itself has this name: take another."
        )
    if names and options.ray:
        raise UsageError("--adapter NAME=FOLDER does not go with --ray: leave one of them out.")
    own = () if folders.own is None or options.ray else (folders.own,)  # on the replicas' machines
    for folder in (*own, *folders.named.values()):
        check_adapter_folder(folder)


def _check_served_names(names: Sequence[str]) -> None:
    """Raise UsageError if a name is blank, has invisible characters or is given twice."""
    for index, name in enumerate(names):
        if not name.strip() or not name.isprintable():
            raise UsageError(
                f"--served-model-name {name!r} is no name: give one that requests can have in "
                "their field model, or leave it out for that of --model."
            )
        if name in names[:index]:
            raise UsageError(f"--served-model-name {name} is given twice: give it once.")


def _check_device_budget(loaded: LoadedModel, budgets: ByteBudgets) -> None:
    """Raise UsageError if the device's budget has no room for a token and its answer."""
    from larder.store.ledger import Tier

    limit, least = budgets.total.get(Tier.DEVICE), loaded.decoder.spec.full_bytes(2)
    if limit is not None and limit < least:
        raise UsageError(
            f"--kv-budget gives the caches of {loaded.name} {limit:,} bytes, but two tokens take "
            f"{least:,}: raise it."
        )


def context_transfers(options: ServeOptions) -> list[ContextTransfer]:
    """Transfers of the values of `--reuse-contexts`.

    Raises:
        UsageError: one is malformed, or a model takes contexts from two.
    """
    if not options.reuse_contexts:
        return []
    from larder.server.model_router import ContextTransfer

    found = list(map(ContextTransfer.parse, options.reuse_contexts))
    receivers = [each.receiver for each in found]
    if twice := [name for name in receivers if receivers.count(name) > 1]:
        raise UsageError(
            f"--reuse-contexts {twice[0]}=... is given twice: a model takes contexts from one."
        )
    return found


def read_template(path: Path) -> str:
    """Chat template of a file, which is compiled once to see that it can be.

    Raises:
        InputError: the file cannot be read, or is no template.
    """
    from jinja2 import TemplateSyntaxError

    from larder.session.transcript.template_sandbox import compile_template

    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"--chat-template {path} cannot be read ({error.strerror}): name a file that has the "
            "template."
        ) from error
    if len(data) > MAX_TEMPLATE_BYTES:
        raise InputError(
            f"--chat-template {path} has more than {MAX_TEMPLATE_BYTES >> 10} KiB, the most that "
            "is read: give a shorter template."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--chat-template {path} cannot be read (it is not UTF-8): name another file."
        ) from error
    try:
        compile_template(text)
    except TemplateSyntaxError as error:
        raise InputError(
            f"--chat-template {path}, line {error.lineno}, is no template: {error.message}. "
            "Correct it, or leave it out for the model's own."
        ) from error
    except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
        raise InputError(
            f"--chat-template {path} cannot be compiled ({type(error).__name__}): give a template "
            "with less nesting and shorter numbers."
        ) from error
    return text


def model_clients(
    options: ServeOptions,
    budgets: ByteBudgets,
    store: Store,
    locks: SessionLocks,
    stage: ProgressStage,
) -> EngineClient:
    """Client of the model, and of its adapters if there are any; each has the same share of the
    budgets, and they take turns on the device.

    Args:
        stage: shows the stages of loading and measuring.
    """
    from larder.cli.question_run import check_model_options, load_model
    from larder.models.loader import with_adapters
    from larder.server.model_router import ModelRouter, TurnLock

    check_model_options(options)
    folders = split_adapters(options.adapter or ())
    loaded = load_model(options, folders.own, stage)
    if options.chat_template is not None:
        loaded = replace(loaded, tokenizer=deepcopy(loaded.tokenizer))
        loaded.tokenizer.chat_template = read_template(options.chat_template)
    if not folders.named:
        names = options.served_model_name or ()
        return _client(options, loaded, names, budgets, store, locks, stage)
    loaded, adapted = with_adapters(loaded, folders.named)
    own_name, *others = options.served_model_name or (loaded.name,)
    share, lock = budgets.divided(1 + len(adapted)), TurnLock()
    served = {own_name: ((own_name, *others), loaded)}
    served |= {name: ((name,), model) for name, model in adapted.items()}
    clients = {
        name: _client(options, model, names, share, store, locks, stage, lock)
        for name, (names, model) in served.items()
    }
    for transfer in context_transfers(options):
        transfer.connect({name: client.context.core for name, client in clients.items()})
    return ModelRouter(clients)


def _client(
    options: ServeOptions,
    loaded: LoadedModel,
    names: Sequence[str],
    budgets: ByteBudgets,
    store: Store,
    locks: SessionLocks,
    stage: ProgressStage,
    step_lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008, without state
) -> LocalEngineClient:
    from larder.cli.question_run import engine_over
    from larder.cli.store_options import streaming_of
    from larder.engine.runtime import engine_runtime
    from larder.engine.snapshots import ModelSnapshots
    from larder.server.engine_client import LocalEngineClient
    from larder.server.engine_options import EngineOptions
    from larder.server.persistence.base import Durability
    from larder.server.persistence.store import StoreSessionPersistence
    from larder.server.request_queue import SchedulingPolicy
    from larder.server.response_cache import ResponseCategory
    from larder.server.tiers.disk import StoreDiskTier
    from larder.session.prefill import load_weights

    _check_device_budget(loaded, budgets)
    engine = engine_over(options, loaded)
    engine.runtime = engine_runtime(loaded.decoder, engine.tokenizer, stage)
    load_weights(engine.runtime, engine.policy)
    persistence = StoreSessionPersistence(store, engine.loaded.decoder.spec, locks)
    streaming = streaming_of(options.resume_deadline)
    snapshots = ModelSnapshots(store, engine.loaded, options.codec, streaming)
    return LocalEngineClient(
        engine,
        EngineOptions(
            budgets,
            options.eviction,
            names=names,
            max_model_len=options.max_model_len,
            prefill_chunk=options.prefill_chunk,
            scheduling=SchedulingPolicy(options.scheduling_policy),
            inter_token_seconds=options.inter_token_latency / 1000 or None,
        ),
        persistence=persistence,
        disk=StoreDiskTier(persistence, snapshots, Durability(options.durability)),
        response_categories=dict(map(ResponseCategory.parse, options.response_category or ())),
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser or "",
        step_lock=step_lock,
    )


def print_address(served: ServedModel, bound: socket.socket, is_document: bool) -> None:
    """Print where a model is served, and what its policy holds beyond the budget.

    Args:
        bound: socket of the server.
        is_document: print one JSON document to standard output, else lines to standard error.
    """
    from larder.session.capacity import beyond_budget_line

    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if is_document:
        address = {"url": url, "model": served.name, "policy": served.policy}
        print_document({"schema": SCHEMA, **address, "beyond_budget": list(served.beyond_budget)})
        sys.stdout.flush()
        return
    print(f"Serving {served.name} at {url} (Ctrl-C ends it)", file=sys.stderr)
    if served.beyond_budget:
        print(f"larder: {beyond_budget_line(served.beyond_budget)}", file=sys.stderr)
